"""The options of RoPE methods as the command line spells them, for every command that takes a method."""

from __future__ import annotations

from typing import Annotated

import typer

RopeTheta = Annotated[float | None, typer.Option(help="theta: the new base.")]
AttentionFactor = Annotated[float | None, typer.Option(help="yarn, longrope: factor on cos and sin.")]
BetaFast = Annotated[float | None, typer.Option(help="yarn, ntk_by_parts: rotations kept whole (32).")]
BetaSlow = Annotated[float | None, typer.Option(help="yarn, ntk_by_parts: rotations interpolated (1).")]
Truncate = Annotated[bool | None, typer.Option(help="yarn, ntk_by_parts: round the ramp outwards (on).")]
Factors = Annotated[str | None, typer.Option(help="longrope: numbers, comma-separated or in a JSON file.")]
LowFreqFactor = Annotated[float | None, typer.Option(help="llama3: L / the longest wavelength ramped (1).")]
HighFreqFactor = Annotated[float | None, typer.Option(help="llama3: L / the shortest one (4).")]
PluginOptions = Annotated[list[str] | None, typer.Option(help="NAME=VALUE: an option of a plugin's method.")]
