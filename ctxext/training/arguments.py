"""What a recipe's config may say. Its other keys are transformers' TrainingArguments, by their own names."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ctxext.data.sources import Source
from ctxext.reading.skip import SkipPolicy

# The PI paper's fine-tuning (arXiv 2306.15595, section 3.1: AdamW beta 0.9/0.95, no weight decay, 2e-5, linear warm-up
# over 20 steps, then no decay) and what an exact log and an exact resume need; a config overrides each by its name.
DEFAULTS: dict[str, Any] = {
    "optim": "adamw_torch",
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "weight_decay": 0.0,
    "learning_rate": 2e-5,
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": 20,
    "max_steps": 1000,
    "per_device_train_batch_size": 1,
    "logging_steps": 1,
    "save_strategy": "steps",
    "save_steps": 100,
    "save_total_limit": 2,
    "report_to": "none",
    "seed": 0,
}

# What the recipe fixes, because anything else would break the data's order, the log or a resume.
FIXED: dict[str, Any] = {
    "logging_nan_inf_filter": False,
    "train_sampling_strategy": "sequential",
    "remove_unused_columns": False,
    "label_names": ["labels"],
}

# TrainingArguments that cannot take effect here, and what to use in their place.
REFUSED: dict[str, str] = {
    **dict.fromkeys(("logging_nan_inf_filter", "remove_unused_columns", "label_names"), "the recipe sets it"),
    "train_sampling_strategy": "the packs are shuffled already (data_seed, or seed)",
    "length_column_name": "the packs are shuffled already (data_seed, or seed)",
    "num_train_epochs": "state max_steps, or epochs for passes over a single source",
    "gradient_accumulation_steps": "state batch_size, the sequences of one step over all devices",
    "auto_find_batch_size": "it would change the batches; state per_device_train_batch_size",
    "ignore_data_skip": "a resumed run sees the batches of the unbroken one",
    "dataloader_drop_last": "the packs fill every batch",
    "resume_from_checkpoint": "use resume",
    "average_tokens_across_devices": "the loss is always averaged over the tokens of all devices",
    "load_best_model_at_end": "evaluations are logged; choose a checkpoint-N by them",
    "metric_for_best_model": "evaluations are logged; choose a checkpoint-N by them",
    "greater_is_better": "evaluations are logged; choose a checkpoint-N by them",
    "save_only_model": "such a checkpoint cannot be resumed; the final model is saved without optimizer states anyway",
    "push_to_hub": "push the finished folder",
    **dict.fromkeys(
        (
            "do_train",
            "do_eval",
            "do_predict",
            "eval_strategy",
            "eval_steps",
            "eval_delay",
            "eval_on_start",
            "per_device_eval_batch_size",
            "prediction_loss_only",
            "batch_eval_metrics",
            "eval_do_concat_batches",
            "eval_accumulation_steps",
            "include_for_metrics",
            "bf16_full_eval",
            "fp16_full_eval",
        ),
        "use evaluations and evaluate_every",
    ),
}


class Data(BaseModel):
    """The training data.

    Attributes:
        sources: One or several, mixed by their weights.
        boundaries: `isolated`: packed documents do not read each other; `joined`: a pack is one sequence.
        bos: Begin-of-sequence token at each document's start: `auto` (if the tokenizer has one), `always` or `never`.
        eos: End-of-sequence token at each document's end, in the same words.
        cache: The folder for tokens; ctxext's cache by default.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    sources: tuple[Source, ...] = Field(min_length=1)
    boundaries: Literal["isolated", "joined"] = "isolated"
    bos: Literal["auto", "always", "never"] = "auto"
    eos: Literal["auto", "always", "never"] = "auto"
    cache: str | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(self.sources) == 1 and "weight" in self.sources[0].model_fields_set:
            raise ValueError("weight has no effect with a single source: leave it out")
        return self


class Lora(BaseModel):
    """Low-rank adapters (arXiv 2106.09685).

    Attributes:
        r: Rank.
        alpha: The adapters' output is scaled by alpha / r.
        dropout: On the adapters' input.
        targets: Names of the linear layers to adapt, such as `q_proj`.
        embeddings_and_norms: Train the token embeddings and every norm too, as LongLoRA does (arXiv 2309.12307).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    r: int = Field(default=8, ge=1)
    alpha: float = Field(default=16, gt=0, allow_inf_nan=False)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    targets: tuple[str, ...] = Field(default=("q_proj", "k_proj", "v_proj", "o_proj"), min_length=1)
    embeddings_and_norms: bool = False


class ReadingMemory(BaseModel):
    """What rows remember of their documents; see `ctxext.reading.memory.MemoryConfig`.

    Attributes:
        size: Tokens that a row remembers, at every layer.
        top_k: Keys that a query reads of window and memory; all by default.
        gate: Learn by head how much to read of the memory.
        sinks: First tokens of a document that are never forgotten.
        distance: Tokens before the window at which all that is remembered is read.
        offload: Keep the memory in the host's memory.
        eviction: What goes when it is full: `fifo`, `lra` (least recently attended) or `lfa` (least frequently).
        index: `exact`, or `approximate` for large memories: needs top_k, and faiss of the extra `read`.
        probed: Share of the approximate index's cells that a query looks into.
        wait: Tokens that queries wait for, in a second reading of a window, whose keys are then what is remembered.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    size: int = 1536
    top_k: int | None = None
    gate: bool = False
    sinks: int = 0
    distance: int = 1
    offload: bool = False
    eviction: Literal["fifo", "lra", "lfa"] = "fifo"
    index: Literal["exact", "approximate"] = "exact"
    probed: float = 0.0625
    wait: int = 0

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.config()
        return self

    def config(self) -> Any:
        """Return the `MemoryConfig`.

        Raises:
            ValueError: With all values that are out of range.
        """
        from ctxext.reading.memory import MemoryConfig

        return MemoryConfig(**self.model_dump())


class Reading(BaseModel):
    """Random-access reading (arXiv 2405.13216): how far each row skips after a window; see `ctxext.reading`.

    Attributes:
        rate: K, tokens; 0 reads everything in order.
        threshold: alpha, nats.
        pooling: How a window's losses become one: `mean`, `exponential-decay` or `last`.
        decay: Of `exponential-decay`, between 0 and 1.
        scope: What the policy sees the end of: a `document`, or the `stream` of all documents.
        memory: What rows remember of their documents; nothing by default.
        streaming: Tokenize documents as rows come to them and keep none: for corpora too large to tokenize beforehand.
        shuffle_buffer: With streaming: documents of a source that are shuffled among each other, and held as text.
        corpus_tokens: With streaming and scope `stream`: tokens of one pass over all sources, about.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    rate: int = 0
    threshold: float = 6.0
    pooling: str = "mean"
    decay: float = 0.99
    scope: Literal["document", "stream"] = "document"
    memory: ReadingMemory | None = None
    streaming: bool = False
    shuffle_buffer: int = Field(default=1000, ge=1)
    corpus_tokens: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.policy  # noqa: B018  # checks the values
        problems = []
        if "shuffle_buffer" in self.model_fields_set and not self.streaming:
            problems.append("shuffle_buffer has no effect without streaming: tokenized documents are all shuffled")
        if self.corpus_tokens is not None and not (self.streaming and self.scope == "stream"):
            problems.append("corpus_tokens has no effect but with streaming and scope 'stream': leave it out")
        if self.streaming and self.scope == "stream" and self.corpus_tokens is None:
            problems.append(
                "scope 'stream' needs the length of the stream, which is not known when streaming: state "
                "corpus_tokens, the tokens of one pass, or use scope 'document'"
            )
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @property
    def policy(self) -> SkipPolicy:
        """The rule by which rows skip."""
        return SkipPolicy(rate=self.rate, threshold=self.threshold, pooling=self.pooling, decay=self.decay)


class Recipe(BaseModel):
    """A fine-tuning run.

    Attributes:
        model: A checkpoint folder, a GGUF file or a Hub id; patched already where `method` is not given.
        length: Tokens in a training sequence; the length that the model is extended to.
        method: The position method to patch the model with before training; the weights of SOURCE stay as they are.
        original_length: The pretrained window in tokens, where the model's config is ambiguous.
        method_options: The method's own options.
        tuning: `full`, `lora` or `qlora` (the frozen weights in NF4).
        lora: The adapters, for `lora` and `qlora`.
        data: The training data.
        batch_size: Sequences in one optimizer step, over all devices and accumulation.
        epochs: Passes over the single source, in place of max_steps.
        dtype: Of the weights while training; by default float32 for `full` and bfloat16 for the frozen ones otherwise.
            (`bf16: true` computes in bfloat16 and keeps float32 weights.)
        attention: transformers' attention backend.
        warmup_start: The first step's rate, as a share of the rate after the warm-up.
        memory: What a step keeps: `plain` (as Trainer comes), `fast` (loss by chunks, cheap operations computed
            again) or `lean` (loss by chunks, whole layers computed again); see `ctxext.training.lean_presets`.
        offload: With `lean` on a GPU: keep the layers' inputs in the host's memory.
        reading: Windows of documents in place of packs, with skipping.
        evaluations: Evaluations to run while training: options by the name of an installed evaluation.
        evaluate_every: Run them before the first step, after every so many, and at the end.
        save_at: Save a checkpoint after these steps too, beside those of save_steps.
        loss_limit: Stop when a step's loss is so many times the median of the 50 before it.
        resume: `auto` (go on from the newest whole checkpoint of output_dir, if there is one) or `never`.
        training: transformers' TrainingArguments; in a config they stand at the top level.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    model: str
    length: int = Field(ge=2)
    data: Data
    method: str | None = None
    original_length: int | None = Field(default=None, ge=1)
    method_options: dict[str, Any] = {}
    tuning: Literal["full", "lora", "qlora"] = "full"
    lora: Lora | None = None
    batch_size: int = Field(default=64, ge=1)
    epochs: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    dtype: Literal["float32", "bfloat16"] | None = None
    attention: str = "sdpa"
    warmup_start: float = Field(default=0.1, ge=0, le=1)
    memory: Literal["plain", "fast", "lean"] = "plain"
    offload: bool = False
    reading: Reading | None = None
    evaluations: dict[str, dict[str, Any]] = {}
    evaluate_every: int | None = Field(default=None, ge=1)
    save_at: tuple[Annotated[int, Field(ge=1)], ...] = ()
    loss_limit: float = Field(default=3.0, gt=1, allow_inf_nan=False)
    resume: Literal["auto", "never"] = "auto"
    training: dict[str, Any] = {}

    @model_validator(mode="after")
    def _check(self) -> Self:
        problems = [*self._method_problems(), *self._evaluation_problems(), *self._memory_problems()]
        problems += self._reading_problems()
        if self.lora is not None and self.tuning == "full":
            problems.append("lora has no effect with tuning 'full'; set tuning to lora or qlora, or leave it out")
        if self.epochs is not None and len(self.data.sources) > 1:
            problems.append("epochs are defined for a single source; state max_steps instead")
        if self.tuning == "qlora" and self.dtype == "float32":
            problems.append("dtype 'float32' has no effect with tuning 'qlora', whose frozen weights are NF4")
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def _method_problems(self) -> list[str]:
        given = {"original_length", "method_options"} & self.model_fields_set
        if self.method is None and given:
            return [f"{' and '.join(sorted(given))} have no effect without method"]
        return []

    def _evaluation_problems(self) -> list[str]:
        if bool(self.evaluations) != (self.evaluate_every is not None):
            return ["evaluations and evaluate_every go together: give both or neither"]
        return []

    def _reading_problems(self) -> list[str]:
        if self.reading is None:
            return []
        problems = []
        if self.epochs is not None:
            problems.append("epochs are not known beforehand when documents are skipped: state max_steps instead")
        if self.memory != "plain":
            problems.append(
                f"reading needs the loss of every token, which memory {self.memory!r} does not give: plain"
            )
        kinds = {source.kind for source in self.data.sources}
        if not kinds <= {"text", "completion"}:
            problems.append(
                "reading takes sources of kind text, or completion (a document, and its question and answer)"
            )
        if "completion" in kinds and self.reading.scope == "stream":
            problems.append("reading.scope 'stream' has no place for the questions of sources of kind completion")
        problems += self._streaming_problems() if self.reading.streaming else []
        if self.reading.memory is not None and self.reading.memory.gate and self.tuning != "full":
            problems.append(
                f"reading.memory.gate is trained with tuning 'full' only, not {self.tuning!r}: leave it out"
            )
        return problems

    def _streaming_problems(self) -> list[str]:
        problems = []
        if self.data.cache is not None:
            problems.append("data.cache has no effect with reading.streaming, which keeps no tokens: leave it out")
        for number, source in enumerate(self.data.sources):
            given = {"max_tokens", "upsample_above", "upsample_times"} & source.model_fields_set
            if given:
                problems.append(
                    f"data.sources.{number}: {' and '.join(sorted(given))} cannot take effect with reading.streaming, "
                    "which keeps no tokens and does not know what is to come: leave it out"
                )
        return problems

    def _memory_problems(self) -> list[str]:
        problems = []
        if self.offload and self.memory != "lean":
            problems.append(f"offload moves what memory 'lean' keeps, and memory is {self.memory!r}: set it to lean")
        if self.memory == "plain":
            return problems
        for key in ("activation_checkpointing", "gradient_checkpointing"):
            if self.training.get(key):
                problems.append(
                    f"{key} has no place beside memory {self.memory!r}, which computes again what it needs"
                )
        for key in ("label_smoothing_factor", "use_liger_kernel"):
            if self.training.get(key):
                problems.append(
                    f"{key} needs Trainer's own loss, which memory {self.memory!r} replaces: set memory: plain"
                )
        return problems

    @property
    def weights_dtype(self) -> str:
        """The dtype that the weights are loaded in."""
        return self.dtype or ("float32" if self.tuning == "full" else "bfloat16")

    @property
    def adapters(self) -> Lora:
        """The adapters of a run that has some."""
        assert self.tuning != "full"
        return self.lora or Lora()
