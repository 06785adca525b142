"""Push a checkpoint folder to the Hub: one commit, in which all files appear together or none does."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ctxext.checkpoint.doctor import doctor
from ctxext.checkpoint.files import read_json
from ctxext.hub.card import card_uploads, is_ours
from ctxext.hub.failures import HubError, blot, explain, no_token
from ctxext.hub.files import ADAPTER_FILES, FIGURES, README, Upload, is_adapter, plan_files, refuse_secrets

REPO_ID = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
# What a loader would read of an earlier checkpoint in the repository, in place of this one or on top of it.
_OF_AN_EARLIER_ONE = re.compile(
    r".*\.safetensors|.*\.safetensors\.index\.json|(pytorch_model|adapter_model).*\.bin(\.index\.json)?"
    r"|adapter_config\.json"
)


def push(
    output: str | Path,
    repo_id: str,
    *,
    private: bool = False,
    revision: str | None = None,
    dry_run: bool = False,
    force: bool = False,
    results: Sequence[Path] = (),
    recipe: Path | None = None,
    message: str | None = None,
    card: bool | None = None,
) -> dict[str, Any]:
    """Publish a checkpoint or adapter, with its model card.

    Files go up before the commit that names them, so that a push that is cut leaves the repository as it was; the next
    one sends only what is missing. Weights that an earlier push left in the repository and that this one has not are
    deleted in the same commit: a loader would take them.

    Args:
        output: The folder.
        repo_id: `user/name` or `organization/name`; made if it is not there.
        private: Make it private; refuse one that is there and public.
        revision: The branch, made if it is not there; `main` by default.
        dry_run: Ask nothing of the Hub and send nothing.
        force: Push what `doctor` finds faulty.
        results: Files of evaluations for the card.
        recipe: The config that the checkpoint was trained with, for the card, where it does not lie beside it.
        message: Of the commit.
        card: True to write a README.md in place of one that is there, False to send none; by default one that is
            there, here or in the repository, is kept unless ctxext made it.

    Returns:
        `repository`, `url`, `revision`, `private`, `files` (`path`, `size`), `bytes`, `left_out` (`path`, `reason`,
        `size`), `faults` that count, `notes`, `pushed`, `commit` (None if nothing was sent) and `deleted`, the paths
        that this push took away.

    Raises:
        ValueError: If the call is wrong or there is nothing to push; nothing is sent then.
        HubError: If the Hub refuses, or the connection does: what happened, what is on the Hub now, what to do.
    """
    folder = Path(output).expanduser()
    _check(folder, repo_id, message)
    uploads, left = plan_files(folder)
    answer = doctor(folder)
    faults = [fault for fault in answer["faults"] if fault["level"] != "notice"]
    sends = not dry_run and (force or not faults)
    page, notes = card_uploads(folder, repo_id, results, recipe, card, faults, ask_hub=sends)
    if page or card is False:
        uploads = [upload for upload in uploads if upload.path != README and not upload.path.startswith(f"{FIGURES}/")]
    uploads = sorted([*uploads, *page], key=lambda upload: upload.path)
    refuse_secrets(page)
    report: dict[str, Any] = {
        "repository": repo_id,
        "url": None,
        "revision": revision or "main",
        "private": private,
        "files": [{"path": upload.path, "size": upload.size} for upload in uploads],
        "bytes": sum(upload.size for upload in uploads),
        "left_out": [asdict(one) for one in left],
        "faults": faults,
        "notes": [*notes, *_local_names(folder)],
        "pushed": False,
        "commit": None,
        "deleted": [],
    }
    if not sends:
        return report
    made_card = bool(page) and card is None
    return {**report, **_Remote(repo_id, revision, private).send(uploads, message or _title(folder), made_card)}


def _check(folder: Path, repo_id: str, message: str | None) -> None:
    problems = []
    if not folder.is_dir():
        problems.append(f"there is no folder {folder}; push takes a checkpoint folder on this machine")
    if not REPO_ID.fullmatch(repo_id):
        problems.append(f"{repo_id!r} is no repository; write user/name or organization/name")
    if message is not None and not message.strip():
        problems.append("--message is empty; say what this push is, or leave it out")
    if problems:
        raise ValueError("; ".join(problems))


def _title(folder: Path) -> str:
    record = read_json(folder / "config.json").get("ctxext") if (folder / "config.json").exists() else None
    kind = "adapter" if is_adapter(folder) else "checkpoint"
    if not isinstance(record, dict):
        return f"Upload {kind}"
    return f"Upload {kind}: {record.get('method')}, {record.get('length')} tokens"


def _local_names(folder: Path) -> list[str]:
    """Return a note for each place where a file that is published names a folder of this machine."""
    named: list[tuple[str, str, Any]] = []
    if (folder / "config.json").exists():
        record = read_json(folder / "config.json").get("ctxext")
        named.append(("config.json", "ctxext.source", record.get("source") if isinstance(record, dict) else None))
    if (folder / ADAPTER_FILES[0]).exists():
        base = read_json(folder / ADAPTER_FILES[0]).get("base_model_name_or_path")
        named.append((ADAPTER_FILES[0], "base_model_name_or_path", base))
    notes = []
    for file, key, value in named:
        if isinstance(value, str) and (Path(value).is_absolute() or Path(value).expanduser().exists()):
            needed = "; nobody else can load the adapter: name the base's repository" if "adapter" in file else ""
            notes.append(f"{file} names a place on this machine ({key}: {value}){needed}")
    return notes


class _Remote:
    """A branch of a repository on the Hub, and how far a push to it has come."""

    def __init__(self, repo_id: str, revision: str | None, private: bool) -> None:
        from huggingface_hub import HfApi, get_token

        token = get_token()
        if not token:
            raise no_token()
        self.token, self.repo_id, self.revision, self.private = token, repo_id, revision or "main", private
        self.api = HfApi(token=token, library_name="ctxext")
        self.before: str | None = None  # the branch's commit; None until it is known
        self.reached = False  # whether the repository is known to be there

    def send(self, uploads: list[Upload], message: str, made_card: bool) -> dict[str, Any]:
        """Make what is missing, upload, commit, and check that all files are there."""
        try:
            self._prepare()
            there = self.api.list_repo_files(self.repo_id, revision=self.before)
            if made_card and README in there and not self._has_our_card():
                uploads = [upload for upload in uploads if upload.path != README]
            sent = {upload.path for upload in uploads}
            stale = sorted(path for path in there if _OF_AN_EARLIER_ONE.fullmatch(path) and path not in sent)
            oid = self._commit(uploads, stale, message)
            missing = sorted(sent - set(self.api.list_repo_files(self.repo_id, revision=oid)))
        except HubError:
            raise
        except Exception as error:  # of huggingface_hub, of its HTTP client, of Xet: each has its own
            what, todo = explain(error, self.token)
            raise HubError(f"{what}. {self._state(sent=uploads)}. To do: {todo}") from None
        if missing:
            raise HubError(
                f"the Hub left out {', '.join(missing)}, perhaps for a .gitignore in the repository. Commit {oid} has "
                "the other files. To do: take that .gitignore away, then push again"
            )
        page = f"{blot(self.api.endpoint, self.token)}/{self.repo_id}"
        return {
            "url": page if self.revision == "main" else f"{page}/tree/{self.revision}",
            "files": [{"path": upload.path, "size": upload.size} for upload in uploads],
            "bytes": sum(upload.size for upload in uploads),
            "pushed": oid != self.before,
            "commit": oid,
            "deleted": stale,
        }

    def _prepare(self) -> None:
        """Make the repository and the branch where they are missing, and learn what commit the branch is at."""
        self.api.create_repo(self.repo_id, private=self.private or None, exist_ok=True)
        info = self.api.model_info(self.repo_id)
        self.reached = True
        if self.private and not info.private:
            raise HubError(
                f"{self.repo_id} is there already and is public, so nothing was sent. To do: make it private in its "
                "settings on the Hub, or push to another name; leave --private out if all may read it"
            )
        if self.revision != "main" and not self.revision.startswith("refs/"):
            self.api.create_branch(self.repo_id, branch=self.revision, exist_ok=True)
        self.before = self.api.model_info(self.repo_id, revision=self.revision).sha

    def _has_our_card(self) -> bool:
        path = self.api.hf_hub_download(self.repo_id, README, revision=self.before)
        return is_ours(Path(path).read_text(encoding="utf-8", errors="replace"))

    def _commit(self, uploads: list[Upload], stale: list[str], message: str) -> str:
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        add = [CommitOperationAdd(path_in_repo=one.path, path_or_fileobj=one.source) for one in uploads]
        delete = [CommitOperationDelete(path_in_repo=path) for path in stale]
        # The parent makes the Hub refuse when somebody else has pushed since the branch was looked at.
        made = self.api.create_commit(
            self.repo_id,
            operations=[*add, *delete],
            commit_message=message,
            revision=self.revision,
            parent_commit=self.before,
        )
        return str(made.oid)

    def _state(self, sent: list[Upload]) -> str:
        """Return what is on the Hub now, as far as it can be asked."""
        where = f"{self.repo_id} ({self.revision})"
        try:
            now = self.api.model_info(self.repo_id, revision=self.revision, timeout=10).sha
            there = self.api.list_repo_files(self.repo_id, revision=now)
        except Exception:
            if self.before is None and not self.reached:
                return "No file of this push is on the Hub"
            if self.before is None:
                return f"The repository {self.repo_id} is there, and nothing of this push is in it"
            return (
                f"What is in {where} now cannot be asked; it was at commit {self.before}, and all files of a push "
                "appear in one commit or not at all"
            )
        if self.before is None or now == self.before:
            return f"Nothing of this push is in {where}, which is at commit {now} as before"
        if {upload.path for upload in sent} <= set(there):
            return f"{where} has moved to commit {now}, which has all files of these names: the push may have arrived"
        return f"{where} has moved to commit {now}, which is not this push"
