"""Attention biases that depend on head and distance alone: formulas, and the module that serves them to attention.

`distance = query position - key position`, never negative under a causal mask. Every bias is one float32 table by
(head, distance), added to the scaled logits q.k / sqrt(d) before the softmax. H heads are numbered n = 1 .. H, and
h_n = 8 n / H as in ALiBi (arXiv 2108.12409) and Sandwich (arXiv 2212.10356, eq. 6).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

TAIL = 512  # entries of minus infinity behind distance 0: the most rows that one block of queries may have


def head_exponents(num_heads: int) -> torch.Tensor:
    """Return h_n = 8 n / H: `(num_heads,)`, float64."""
    return torch.arange(1, num_heads + 1, dtype=torch.float64) * 8.0 / num_heads


def alibi_exponents(num_heads: int) -> torch.Tensor:
    """Return h of ALiBi's slopes 2^-h: `(num_heads,)`, float64.

    8 n / H where H is a power of two; otherwise those of the next lower power of two, then every other one of the
    next higher power (arXiv 2108.12409, section 3, and its reference code).
    """
    lower = 1 << (num_heads.bit_length() - 1)
    between = head_exponents(2 * lower)[0::2][: num_heads - lower]
    return torch.cat([head_exponents(lower), between])


def alibi(
    distance: torch.Tensor, num_heads: int, *, slope_shift: float = 0.0, shared_exponent: float | None = None
) -> torch.Tensor:
    """Return -2^-(h_n + Delta) * distance (arXiv 2108.12409, section 3; arXiv 2212.10356, section 4).

    Args:
        distance: `(n,)`, tokens.
        num_heads: H.
        slope_shift: Delta, added to every h.
        shared_exponent: One h for all heads, in place of ALiBi's.

    Returns:
        `(num_heads, n)`, float64.
    """
    exponents = alibi_exponents(num_heads)
    if shared_exponent is not None:
        exponents = torch.full_like(exponents, shared_exponent)
    return -torch.exp2(-(exponents + slope_shift))[:, None] * distance.double()


def sandwich(distance: torch.Tensor, num_heads: int, *, dimension: int = 128, base: float = 10000.0) -> torch.Tensor:
    """Return (p_m . p_n - dbar / 2) / h_n of sinusoidal embeddings p (arXiv 2212.10356, eq. 5 and 6).

    p_m . p_n = sum over i < dbar / 2 of cos((m - n) base^(-2i / dbar)); zero at distance 0.

    Args:
        distance: `(n,)`, tokens.
        num_heads: H.
        dimension: dbar, even.
        base: Of the frequencies.

    Returns:
        `(num_heads, n)`, float64.
    """
    frequencies = base ** -(torch.arange(0, dimension, 2, dtype=torch.float64) / dimension)
    products = torch.cos(distance.double()[:, None] * frequencies).sum(dim=1)
    return (products - dimension / 2) / head_exponents(num_heads)[:, None]


def smoothed_sandwich(
    distance: torch.Tensor, num_heads: int, *, log_slope: float = 0.825, offset: float = 0.8
) -> torch.Tensor:
    """Return -(log_slope ln(1 + distance) + offset) * 8 / h_n (arXiv 2212.10356, section 6; its curve is h = 8).

    Args:
        distance: `(n,)`, tokens.
        num_heads: H.
        log_slope: Of the log curve at h = 8.
        offset: At distance 0 and h = 8.

    Returns:
        `(num_heads, n)`, float64.
    """
    curve = -(log_slope * torch.log1p(distance.double()) + offset)
    return curve * 8.0 / head_exponents(num_heads)[:, None]


def windowed(distance: torch.Tensor, num_heads: int, *, window: int, with_alibi: bool = False) -> torch.Tensor:
    """Return 0, or ALiBi's bias, below `window` and minus infinity from there on (arXiv 2212.10356, eq. 3).

    Args:
        distance: `(n,)`, tokens.
        num_heads: H.
        window: w, tokens, the own one included.
        with_alibi: Whether ALiBi acts within the window.

    Returns:
        `(num_heads, n)`, float64.
    """
    inside = alibi(distance, num_heads) if with_alibi else torch.zeros(num_heads, len(distance), dtype=torch.float64)
    return inside.masked_fill(distance >= window, -math.inf)


def t5_buckets(distance: torch.Tensor, num_buckets: int, max_distance: int) -> torch.Tensor:
    """Return the causal bucket of each distance (arXiv 1910.10683, section 2.1, in its reference form).

    The first half of the buckets holds one distance each; the others grow logarithmically up to `max_distance`, from
    where on the last one holds all.

    Args:
        distance: `(n,)`, tokens.
        num_buckets: Of a head.
        max_distance: Where the last bucket starts, tokens.

    Returns:
        `(n,)`, int64.
    """
    exact = num_buckets // 2
    spread = torch.log(distance.clamp(min=1).double() / exact) / math.log(max_distance / exact)
    large = (exact + (spread * (num_buckets - exact)).long()).clamp(max=num_buckets - 1)
    return torch.where(distance < exact, distance.long(), large)


class LearnedBias(nn.Module):
    """A bias with parameters of its own, float32 whatever the model's dtype."""

    def initial_values(self, num_heads: int) -> dict[str, torch.Tensor]:
        """Return what the parameters start from, float32."""
        raise NotImplementedError

    def forward(self, distance: torch.Tensor) -> torch.Tensor:
        """Return the bias at `distance` `(n,)`, whole tokens from 0: `(num_heads, n)`, float32."""
        raise NotImplementedError

    @torch.no_grad()
    def initialize(self) -> None:
        """Give the parameters what they start from, unless they were loaded."""
        start = self.initial_values(next(self.parameters()).shape[0])
        for name, parameter in self.named_parameters():
            if not getattr(parameter, "_is_hf_initialized", False):
                parameter.copy_(start[name])


class KerpleLog(LearnedBias):
    """-r1 ln(1 + r2 distance), r1 and r2 > 0 learned for each head (arXiv 2205.09921, the logarithmic variant).

    Both are learned as their logarithms, so that they stay positive. They start spread evenly over the heads: r1 over
    (0, 2), r2 over (0, 1), the intervals that the paper's code draws them from.
    """

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        start = self.initial_values(num_heads)
        self.log_r1 = nn.Parameter(start["log_r1"])
        self.log_r2 = nn.Parameter(start["log_r2"])

    def initial_values(self, num_heads: int) -> dict[str, torch.Tensor]:
        """Return what the parameters start from, float32."""
        spread = _spread(num_heads)
        return {"log_r1": torch.log(2.0 * spread).float(), "log_r2": torch.log(spread.flip(0)).float()}

    def forward(self, distance: torch.Tensor) -> torch.Tensor:
        """Return the bias at `distance` `(n,)`: `(num_heads, n)`, float32."""
        r1, r2 = self.log_r1.float().exp(), self.log_r2.float().exp()
        return -r1[:, None] * torch.log1p(r2[:, None] * distance.float())


class KerplePower(LearnedBias):
    """-r1 distance^r2, r1 > 0 and 0 < r2 <= 2 learned for each head (arXiv 2205.09921, the power variant).

    r1 is learned as its logarithm, r2 as 2 sigmoid(x). They start spread evenly over the heads: r1 over (0, 1), r2
    over (0, 2).
    """

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        start = self.initial_values(num_heads)
        self.log_r1 = nn.Parameter(start["log_r1"])
        self.logit_r2 = nn.Parameter(start["logit_r2"])

    def initial_values(self, num_heads: int) -> dict[str, torch.Tensor]:
        """Return what the parameters start from, float32."""
        spread = _spread(num_heads)
        return {"log_r1": torch.log(spread).float(), "logit_r2": torch.logit(spread.flip(0)).float()}

    def forward(self, distance: torch.Tensor) -> torch.Tensor:
        """Return the bias at `distance` `(n,)`: `(num_heads, n)`, float32."""
        r1, r2 = self.log_r1.float().exp(), 2.0 * torch.sigmoid(self.logit_r2.float())
        far = distance.clamp(min=1).float()  # the gradient of 0^r2 is not finite; distance 0 has bias 0 whatever r2
        return -r1[:, None] * torch.where(distance > 0, far ** r2[:, None], 0.0)


class T5(LearnedBias):
    """One learned number for each head and bucket of distances (arXiv 1910.10683, section 2.1); zeros at first."""

    def __init__(self, num_heads: int, *, num_buckets: int = 32, max_distance: int = 128) -> None:
        super().__init__()
        self.num_buckets, self.max_distance = num_buckets, max_distance
        self.weight = nn.Parameter(self.initial_values(num_heads)["weight"])

    def initial_values(self, num_heads: int) -> dict[str, torch.Tensor]:
        """Return what the parameters start from, float32."""
        return {"weight": torch.zeros(num_heads, self.num_buckets)}

    def forward(self, distance: torch.Tensor) -> torch.Tensor:
        """Return the bias at `distance` `(n,)`: `(num_heads, n)`, float32."""
        return self.weight.float()[:, t5_buckets(distance, self.num_buckets, self.max_distance)]


def _spread(count: int) -> torch.Tensor:
    """Return the middles of `count` even parts of (0, 1): `(count,)`, float64."""
    return (torch.arange(count, dtype=torch.float64) + 0.5) / count


FIXED: dict[str, Callable[..., torch.Tensor]] = {
    "alibi": alibi,
    "sandwich": sandwich,
    "smoothed_sandwich": smoothed_sandwich,
    "windowed": windowed,
}
LEARNED: dict[str, type[LearnedBias]] = {"kerple_log": KerpleLog, "kerple_power": KerplePower, "t5": T5}


class ScoreBias(nn.Module):
    """The bias of a model, one for all its layers.

    Args:
        parameters: A config's `bias_parameters`: `bias_type`, its options, and `keep_rotary`, which is the model's.
        num_heads: Query heads.

    Attributes:
        window: Tokens that a query sees, its own included, or None for all before it.
        learned: Whether the bias has parameters.

    Raises:
        ValueError: If `bias_type` is unknown.
    """

    def __init__(self, parameters: dict[str, Any], num_heads: int) -> None:
        super().__init__()
        self.options = {key: value for key, value in parameters.items() if key not in ("bias_type", "keep_rotary")}
        self.bias_type, self.num_heads = str(parameters.get("bias_type")), num_heads
        self.window: int | None = self.options.get("window")
        self.learned = self.bias_type in LEARNED
        self._cached: torch.Tensor | None = None
        if self.bias_type not in (*FIXED, *LEARNED):
            known = ", ".join([*FIXED, *LEARNED])
            raise ValueError(f"bias_parameters: bias_type is {self.bias_type!r}; it must be one of {known}")
        try:
            if not self.learned:
                inspect.signature(FIXED[self.bias_type]).bind(None, num_heads, **self.options)
            self.kernel = LEARNED[self.bias_type](num_heads, **self.options) if self.learned else None
        except TypeError as error:
            raise ValueError(f"bias_parameters of {self.bias_type} are wrong: {error}") from None

    def table(self, distance: torch.Tensor) -> torch.Tensor:
        """Return the bias at `distance` `(n,)`, whole tokens from 0: `(num_heads, n)`, float32."""
        if self.kernel is not None:
            learned: torch.Tensor = self.kernel(distance)
            return learned
        on_cpu = FIXED[self.bias_type](distance.cpu(), self.num_heads, **self.options)  # float64, which not all have
        return on_cpu.float().to(distance.device)

    def forward(self, length: int, device: torch.device) -> torch.Tensor:
        """Return the bias of a row of keys: what attention reads all its blocks from.

        Args:
            length: Keys, and so the largest distance + 1.
            device: Where it is needed.

        Returns:
            `(num_heads, n + TAIL)` float32 for some n >= length: entry n - 1 - distance is the bias at that distance,
            and the TAIL entries behind distance 0, keys after the query, are minus infinity. A key at distance
            `window` or more has minus infinity too.
        """
        if self.kernel is not None:
            place = next(self.kernel.parameters()).device  # another one where layers are spread over devices
            return _reversed(self.table(torch.arange(length, device=place))).to(device)
        row = self._cached
        if row is None or row.shape[1] - TAIL < length or row.device != device:
            rounded = 1 << max(length - 1, 1023).bit_length()
            with torch.inference_mode(False), torch.no_grad():  # a row made in inference mode is no use in training
                row = self._cached = _reversed(self.table(torch.arange(rounded, device=device)))
        return row


def _reversed(table: torch.Tensor) -> torch.Tensor:
    """Return a table by distance `(heads, n)` as `ScoreBias` returns it: `(heads, n + TAIL)`."""
    return torch.cat([table.flip(1), table.new_full((table.shape[0], TAIL), -math.inf)], dim=1)
