"""Tasks of EleutherAI's lm-eval on the loaded checkpoint.

The preset `pi` is the original-window benchmarks of arXiv 2306.15595, section 3.4, zero-shot; lm-eval's long suites
(ruler, longbench, infinitebench) are tasks like any other.

lm-eval cuts a sample that does not fit into the window from the left and scores the rest (its issue 3421). Here every
sample is measured first: over-long ones end the run before it begins, or are left out and counted; none is cut.

`race_middle` and `race_high` are ours: lm-eval's `race` has the high schools only, and asks one question an article.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import importlib.util
import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from ctxext.data.documents import Document, documents_hash
from ctxext.evaluation.base import Evaluation, Plan, Session, Summary, Unit, option

OWN_TASKS = Path(__file__).with_name("tasks")
OVERLONG = ("refuse", "skip")
PI_TASKS = "boolq,piqa,race_middle,race_high,winogrande"
# What lm-eval seeds few-shot examples with, so that its numbers are ours.
LM_EVAL_SEED = 1234


@dataclass
class TaskPlan(Plan):
    """A plan that knows lm-eval's groups, whose scores are made of their tasks' scores."""

    groups: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Work:
    """One task of lm-eval.

    Attributes:
        task: lm-eval's object.
        kept: numbers of the samples to score, ascending.
        everything: whether these are all samples of the task, up to the limit.
        requests: the identity of the requests, which are made again to be scored.
    """

    task: Any
    kept: list[int]
    everything: bool
    requests: str


@dataclass(frozen=True, kw_only=True)
class Harness(Evaluation):
    """Any tasks of lm-eval."""

    name: ClassVar[str] = "harness"
    description: ClassVar[str] = "tasks of EleutherAI's lm-eval: BoolQ, PIQA, RACE, WinoGrande, or any other"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "pi": {"tasks": PI_TASKS, "num_fewshot": 0, "max_samples": 0, "overlong": "refuse"}
    }

    tasks: str = option(PI_TASKS, "tasks, groups or tags of lm-eval, comma-separated")
    num_fewshot: int | None = option(None, "examples before each question, in place of each task's own number")
    max_samples: int = option(0, "only the first samples of each task; 0 reads all")
    overlong: str = option("refuse", "samples that exceed the window: refuse, or skip (and count) them")
    max_length: int = option(0, "the window in tokens; 0 is the checkpoint's")
    max_seq_lengths: str = option("", "lengths in tokens of the samples that ruler's tasks make, such as 4096,8192")
    include_path: str | None = option(None, "a folder of your own task files (yaml)", scored=False)
    seed: int = option(LM_EVAL_SEED, "of few-shot examples, and of tasks that sample")

    def __post_init__(self) -> None:
        wrong = []
        if not self._names():
            wrong.append("--tasks is empty: name tasks of lm-eval, comma-separated")
        for name in ("num_fewshot", "max_samples", "max_length"):
            if (getattr(self, name) or 0) < 0:
                wrong.append(f"--{name.replace('_', '-')} {getattr(self, name)} must not be negative")
        if self.overlong not in OVERLONG:
            wrong.append(f"--overlong {self.overlong!r} is not known; allowed: {', '.join(OVERLONG)}")
        if not all(part.strip().isdigit() and int(part) > 0 for part in self.max_seq_lengths.split(",") if part):
            wrong.append(f"--max-seq-lengths {self.max_seq_lengths!r} must be lengths in tokens, such as 4096,8192")
        if self.include_path is not None and not Path(self.include_path).expanduser().is_dir():
            wrong.append(f"--include-path {self.include_path} is no folder")
        if wrong:
            raise ValueError("; ".join(wrong))

    def _names(self) -> list[str]:
        return [name.strip() for name in self.tasks.split(",") if name.strip()]

    def protocol(self) -> dict[str, Any]:
        """Return the options that change the score, and lm-eval's version."""
        return {**super().protocol(), "tasks": "+".join(self._names()), "lm_eval": _version() or "none"}

    def evaluated_length(self) -> int | None:
        """Return the window, if it was given."""
        return self.max_length or None

    def check(self) -> None:
        """Look for lm-eval."""
        if _version() is None:
            raise ValueError("harness needs lm-eval, which is not installed: run `pip install 'ctxext[eval]'`")

    def plan(self, session: Session) -> Plan:
        """Load the tasks, make their requests and measure each sample."""
        self.check()
        window = self._window(session.model)
        tasks, groups = self._load_tasks(session.tokenizer)
        session.memo["lm"] = _language_model(session, window)
        plan = TaskPlan(units=[], groups=groups)
        problems: list[str] = []
        for name, task in tasks.items():
            plan.units.append(self._unit(session.memo["lm"], name, task, window, plan, problems))
        if problems:
            raise ValueError("; ".join(problems))
        plan.corpus = _corpus(plan.units)
        plan.notes.append(f"lm-eval {_version()}, samples of at most {window} tokens, none of them cut")
        return plan

    def _window(self, model: Any) -> int:
        """Return how many tokens a sample may have, with the room for its answer."""
        from ctxext.evaluation.loading import LENGTH_DEPENDENT, rope_parameters, rope_types

        config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
        found = self.max_length or getattr(config, "max_position_embeddings", None)
        if not self.max_length:
            changing = rope_types(rope_parameters(model.config)) & set(LENGTH_DEPENDENT)
            if changing:
                raise ValueError(
                    f"the frequencies of this checkpoint ({', '.join(sorted(changing))}) depend on the length: give "
                    "--max-length, the longest sample to read, so that all samples are read with the same"
                )
            if found is None:
                raise ValueError("the checkpoint's config states no max_position_embeddings: give --max-length")
        assert found is not None
        return int(found)

    def _load_tasks(self, tokenizer: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return lm-eval's tasks and groups by name, in the order given, with their few-shot numbers set.

        Raises:
            ValueError: if one is unknown, lacks a package, or has a fixed number of examples.
        """
        lengths = [int(part) for part in self.max_seq_lengths.split(",") if part]
        metadata = {"tokenizer": tokenizer.name_or_path, **({"max_seq_lengths": lengths} if lengths else {})}
        manager = _task_manager(self._names(), self.include_path, metadata)
        try:
            loaded = manager.load(self._names())
        except Exception as error:  # whatever a task's file or code does wrong, or its data that cannot be had
            raise ValueError(f"--tasks {self.tasks} cannot be loaded: {type(error).__name__}: {error}") from error
        problems = []
        if lengths and not any(task.get_config("custom_dataset") for task in loaded["tasks"].values()):
            problems.append(f"--max-seq-lengths has no effect: no task of --tasks {self.tasks} makes its own samples")
        for name, task in loaded["tasks"].items():
            own = task.get_config("num_fewshot")
            if own == 0 and self.num_fewshot:
                problems.append(f"--num-fewshot {self.num_fewshot} has no effect on {name}, which fixes it at 0")
            elif own is None or self.num_fewshot is not None:
                task.set_config(key="num_fewshot", value=self.num_fewshot or 0)
        if problems:
            raise ValueError("; ".join(problems))
        return loaded["tasks"], loaded["groups"]

    def _unit(self, lm: Any, name: str, task: Any, window: int, plan: Plan, problems: list[str]) -> Unit:
        """Return one task's unit; state in `plan` what is skipped and in `problems` what must not be."""
        everything = list(range(len(task.eval_docs)))[: self.max_samples or None]
        kept, over, longest = everything, 0, 0
        while True:
            # Few-shot examples are drawn sample after sample, so that leaving one out changes the others.
            self._build(task, kept, len(kept) == len(everything))
            needed = _needed_tokens(lm, task.instances)
            longest = max(longest, *needed.values())
            fitting = [kept[place] for place, tokens in sorted(needed.items()) if tokens <= window]
            over += len(kept) - len(fitting)
            if len(fitting) in (0, len(kept)):
                break
            kept = fitting
        if over and (self.overlong == "refuse" or not fitting):
            problems.append(
                f"{over} of {len(everything)} samples of {name} exceed the window of {window} tokens (the longest "
                f"needs {longest}), which lm-eval would cut: use --overlong skip to leave them out, a checkpoint with "
                "a longer window, or other tasks"
            )
        elif over:
            plan.skipped["samples_longer_than_the_window"] = (
                plan.skipped.get("samples_longer_than_the_window", 0) + over
            )
            plan.notes.append(f"{name}: {over} of {len(everything)} samples exceed {window} tokens and are not scored")
        work = Work(task, kept, not over, _requests_hash(name, task.instances))
        return Unit(name, float(sum(needed.values())), work)

    def _build(self, task: Any, kept: list[int], everything: bool) -> None:
        task.set_fewshot_seed(seed=self.seed)
        chosen = {"limit": self.max_samples or None} if everything else {"samples": kept}
        try:
            task.build_all_requests(**chosen)
        except Exception as error:  # of the task's templates or code
            raise ValueError(
                f"--tasks: no samples can be made of {task.task_name}: {type(error).__name__}: {error}"
            ) from error

    def score(self, session: Session, unit: Unit) -> dict[str, Any]:
        """Let lm-eval score one task; return its metrics."""
        import numpy
        import torch
        from lm_eval.evaluator import evaluate

        work: Work = unit.work
        lm = session.memo["lm"]
        lm.batch_size_per_gpu = session.batch_size
        random.seed(self.seed)
        numpy.random.seed(self.seed)
        torch.manual_seed(self.seed)
        work.task.set_fewshot_seed(seed=self.seed)
        # Samples by number are slow: lm-eval looks up each in a list.
        chosen = {"limit": self.max_samples or None} if work.everything else {"samples": {unit.id: work.kept}}
        found = evaluate(lm, {"tasks": {unit.id: work.task}}, log_samples=False, **chosen)
        assert _requests_hash(unit.id, work.task.instances) == work.requests, "what was measured is what was scored"
        numbers = {key: float(value) for key, value in found["results"][unit.id].items() if _is_number(key, value)}
        return {
            "metrics": {key: value for key, value in numbers.items() if "_stderr," not in key},
            "stderr": {key: value for key, value in numbers.items() if "_stderr," in key},
            "higher_is_better": found["higher_is_better"][unit.id],
            "version": found["versions"][unit.id],
            "num_fewshot": found["n-shot"][unit.id],
            "samples": found["n-samples"][unit.id]["effective"],
            "tokens": int(unit.cost),
        }

    def summarize(self, plan: Plan, scored: Sequence[Mapping[str, Any]]) -> Summary:
        """Name every metric by its task, and let lm-eval's groups average over theirs."""
        by_task = {unit.id: dict(score) for unit, score in zip(plan.units, scored, strict=True)}
        flat: dict[str, dict[str, Any]] = {
            name: {**score["metrics"], **score["stderr"], "sample_len": score["samples"]}
            for name, score in by_task.items()
        }
        groups: dict[str, dict[str, float]] = {}
        for name, group in plan.groups.items() if isinstance(plan, TaskPlan) else ():
            found = group.aggregate(flat) if group.has_aggregation else {}
            groups[name] = {key: float(value) for key, value in found.items() if _is_number(key, value)}
        means = {name: {k: v for k, v in found.items() if "_stderr," not in k} for name, found in groups.items()}
        every = {**means, **{name: score["metrics"] for name, score in by_task.items()}}
        return Summary(
            metrics={f"{name}/{_short(key)}": value for name, found in every.items() for key, value in found.items()},
            tokens_scored=sum(score["tokens"] for score in by_task.values()),
            details={"lm_eval": _version(), "tasks": by_task, "groups": groups},
        )


def _version() -> str | None:
    """Return lm-eval's version, or None if it is not installed; lm-eval itself is not imported."""
    if importlib.util.find_spec("lm_eval") is None:
        return None
    return importlib.metadata.version("lm_eval")


def _task_manager(names: Sequence[str], include_path: str | None, metadata: dict[str, Any]) -> Any:
    """Return lm-eval's index of tasks; its own thousands are read only if a name is not found elsewhere.

    Raises:
        ValueError: if a name is unknown.
    """
    from lm_eval.tasks import TaskManager

    folders = [OWN_TASKS, *([Path(include_path).expanduser()] if include_path else [])]
    manager = TaskManager(include_path=folders, include_defaults=False, metadata=metadata)
    if not set(names) <= set(manager.all_tasks):
        manager = TaskManager(include_path=folders, metadata=metadata)
    problems = []
    for name in names:
        if name not in manager.all_tasks:
            close = difflib.get_close_matches(name, manager.all_tasks, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            problems.append(f"--tasks: lm-eval {_version()} has no task {name!r}{hint}")
    if problems:
        raise ValueError("; ".join([*problems, "your own are found with --include-path"]))
    return manager


def _language_model(session: Session, window: int) -> Any:
    """Return lm-eval's wrapper around the session's model and tokenizer."""
    from lm_eval.models.huggingface import HFLM

    # It warns that options of loading are ignored, of which we give none.
    logging.getLogger("lm_eval.models.huggingface").setLevel(logging.ERROR)
    return HFLM(
        pretrained=session.model, tokenizer=session.tokenizer, max_length=window, batch_size=session.batch_size
    )


def _needed_tokens(lm: Any, instances: Sequence[Any]) -> dict[int, int]:
    """Return the most tokens that a request of each sample takes, by the sample's place among those built."""
    needed: dict[int, int] = {}
    for instance in instances:
        needed[instance.doc_id] = max(needed.get(instance.doc_id, 0), _request_tokens(lm, instance))
    return needed


def _request_tokens(lm: Any, instance: Any) -> int:
    """Return the tokens that lm-eval would read and generate for a request, were the window endless."""
    from lm_eval.models.utils import normalize_gen_kwargs

    text = instance.args[0]
    if instance.request_type == "generate_until":
        options = normalize_gen_kwargs(instance.args[1], lm.max_gen_toks)
        return len(lm.tok_encode(text)) + int(options["max_gen_toks"])
    if instance.request_type == "loglikelihood" and text:
        return len(lm.tok_encode(text + instance.args[1])) - 1  # the last token is predicted, not read
    # One token stands in for the missing context, and the last token is not read.
    return len(lm.tok_encode(instance.args[-1] if instance.request_type == "loglikelihood" else text))


def _requests(name: str, instances: Sequence[Any]) -> Iterator[Document]:
    for number, instance in enumerate(instances):
        texts = [value for value in instance.args if isinstance(value, str)]
        yield Document(f"{name}:{instance.doc_id}:{number}", "\0".join(texts))


def _requests_hash(name: str, instances: Sequence[Any]) -> str:
    return documents_hash(_requests(name, instances))


def _corpus(units: Sequence[Unit]) -> dict[str, Any]:
    """Return what is read, of all tasks."""
    described = {}
    for unit in units:
        task = unit.work.task
        described[unit.id] = {
            "dataset": task.get_config("dataset_path"),
            "config": task.get_config("dataset_name"),
            "split": task.get_config("test_split") or task.get_config("validation_split"),
            "version": str(task.VERSION),
            "num_fewshot": task.get_config("num_fewshot"),
            "samples": len(unit.work.kept),
        }
    return {
        "name": "lm-eval",
        "source": {"kind": "lm-eval", "tasks": described},
        "hash": documents_hash(Document(unit.id, unit.work.requests) for unit in units),
        "documents": sum(len(unit.work.kept) for unit in units),
        "tokens": int(sum(unit.cost for unit in units)),
    }


def _is_number(key: str, value: Any) -> bool:
    """Say whether an entry of lm-eval's results is a metric (`name,filter`) with a value."""
    if "," not in key or isinstance(value, str | bool | list | dict) or value is None:
        return False
    # RULER's tasks have a metric for each length, -1 where there are no samples of it.
    return not (key.split(",")[0].isdigit() and float(value) == -1)


def _short(key: str) -> str:
    """Return `acc` for lm-eval's `acc,none`, and `exact_match,strict` as it is."""
    return key.removesuffix(",none")
