"""What went wrong at the Hub, in words: what happened, and what to do next. No token is ever in them."""

from __future__ import annotations

import re
from typing import Any

# Of an error of the Hub: what it means, and what to do.
_BY_STATUS: dict[int, tuple[str, str]] = {
    400: ("the Hub refuses the request", "mend what it says, then push again"),
    401: (
        "the Hub does not accept the token",
        "make one with write access in your settings on the Hub, and log in with `hf auth login` or set HF_TOKEN",
    ),
    402: ("the Hub asks for a payment", "make room, or pay for it, in your settings on the Hub, then push again"),
    403: (
        "the token may not write there",
        "use a token with write access to that user or organization, or another repository name",
    ),
    404: (
        "the Hub has no such repository, branch or organization, or hides it from this token",
        "check the name and what the token may see, then push again",
    ),
    409: ("another push came in between", "look at what it changed, then push again on top of it"),
    412: ("another push came in between", "look at what it changed, then push again on top of it"),
    413: ("the Hub takes no file or commit as large as this", "split the weights into smaller files, then push again"),
    429: ("the Hub gets too many requests from this account", "wait, then push again"),
}
_AGAIN = "give the same command again: what has been uploaded is not sent a second time"
_LONGEST = 600


class HubError(OSError):
    """A push that failed: what happened, what is on the Hub now, and what to do."""


def no_token() -> HubError:
    """Return the error of a push without a token."""
    return HubError(
        "there is no token for the Hub, so nothing was sent: log in with `hf auth login`, or set HF_TOKEN to a token "
        "with write access"
    )


def explain(error: BaseException, token: str) -> tuple[str, str]:
    """Return what an error of huggingface_hub means, and what to do next.

    Args:
        error: As it was raised; the reason may be a cause of it.
        token: The token in use, which is blotted out should it be in a message.
    """
    response = next((found for one in _causes(error) if (found := getattr(one, "response", None)) is not None), None)
    root = list(_causes(error))[-1]
    if response is None:
        return _without_answer(error, root, token)
    status = int(response.status_code)
    if status >= 500:
        what, todo = "the Hub has trouble of its own", f"wait a little, then {_AGAIN}"
    else:
        what, todo = _BY_STATUS.get(status, ("the Hub refuses the request", "mend what it says, then push again"))
    seconds = _wait(response.headers)
    if status == 429 or (status >= 500 and seconds is not None):
        todo = (
            f"wait {seconds} seconds, then {_AGAIN}" if seconds is not None else f"wait a few minutes, then {_AGAIN}"
        )
    said = blot(_said(response), token)
    return f"{what} ({status}{': ' + said if said else ''})", todo


def _without_answer(error: BaseException, root: BaseException, token: str) -> tuple[str, str]:
    if type(root).__name__ == "OfflineModeIsEnabled":
        return "HF_HUB_OFFLINE is set, so nothing may be sent", "unset it, then push again"
    name, text = type(root).__name__, blot(str(root) or str(error), token)
    if isinstance(root, ValueError) and "README.md" in text:
        return f"the Hub refuses the metadata of README.md: {text}", "mend README.md, then push again"
    kind = "the connection to the Hub failed" if _of_network(root) else "the upload failed"
    return f"{kind} ({name}: {text})", f"once the network is back, {_AGAIN}"


def _of_network(error: BaseException) -> bool:
    return isinstance(error, OSError) or type(error).__module__.partition(".")[0].startswith(("httpx", "httpcore"))


def _causes(error: BaseException | None) -> list[BaseException]:
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if found[-1].__cause__ is None and hasattr(found[-1], "response"):
            break  # the Hub's answer says it; what huggingface_hub met on the way to it does not
    return found


def _wait(headers: Any) -> int | None:
    """Return the seconds that the Hub asks to wait: `Retry-After`, or `t` of its `ratelimit` header."""
    value = str(headers.get("Retry-After", ""))
    if value.isdigit():
        return int(value)
    reset = re.search(r"\bt=(\d+)", str(headers.get("ratelimit", "")))
    return int(reset[1]) if reset else None


def _said(response: Any) -> str:
    """Return what the Hub itself says of an error: one line of its header or of its JSON body."""
    said: Any = response.headers.get("X-Error-Message")
    if not said:
        try:
            said = response.json().get("error")
        except Exception:  # no JSON, no object, or a body that was never read
            said = None
    return " ".join(str(said).split())[:_LONGEST] if said else ""


def blot(text: str, token: str) -> str:
    """Return a text without the token, without what signs an address, and without a password in one."""
    text = text.replace(token, "***") if token else text
    text = re.sub(r"\bhf_[A-Za-z0-9]{8,}\b", "***", text)
    text = re.sub(r"(https?://)[^/\s@]+@", r"\1***@", text)
    text = re.sub(r"(https?://[^\s?'\"]+)\?[^\s'\"]*", r"\1?***", text)
    return " ".join(text.split())[:_LONGEST]
