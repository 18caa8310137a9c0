"""Bar charts as SVG, drawn by hand: a file, or a part of a page, that needs nothing else."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_ROW_PX, _BAR_PX, _LABEL_PX, _PLOT_PX, _VALUE_PX, _TOP_PX = 26, 16, 230, 420, 130, 34


@dataclass(frozen=True)
class Bar:
    """A label, its value, and the half length of its whisker."""

    label: str
    value: float
    deviation: float | None = None


def bar_chart(title: str, bars: Sequence[Bar], file: bool = False) -> str:
    """Horizontal bars from 0, in the given order, each with its value and ± its deviation.

    Args:
        title: shown above, and read out for those who cannot see.
        bars: values of at least 0.
        file: for a file of its own, which must say that it is SVG.
    """
    reach = max((bar.value + (bar.deviation or 0.0) for bar in bars), default=0.0) or 1.0
    width = _LABEL_PX + _PLOT_PX + _VALUE_PX
    height = _TOP_PX + _ROW_PX * len(bars)
    space = ' xmlns="http://www.w3.org/2000/svg"' if file else ""
    rows = "".join(_row(bar, _TOP_PX + _ROW_PX * n, reach) for n, bar in enumerate(bars))
    return (
        f'<svg{space} viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'aria-label="{escape(title)}" font-family="system-ui, sans-serif" font-size="13" '
        f'fill="{"#222" if file else "currentColor"}">\n'
        f'<text x="0" y="18" font-weight="600">{escape(title)}</text>\n{rows}</svg>\n'
    )


def _row(bar: Bar, top: int, reach: float) -> str:
    length = _PLOT_PX * bar.value / reach
    middle, spread = top + _BAR_PX / 2, bar.deviation or 0.0
    end = _LABEL_PX + max(length, _PLOT_PX * (bar.value + spread) / reach)
    parts = [
        f'<text x="{_LABEL_PX - 8}" y="{top + 13}" text-anchor="end">{escape(bar.label)}</text>',
        f'<rect x="{_LABEL_PX}" y="{top}" width="{length:.1f}" height="{_BAR_PX}" rx="2" '
        'fill="#3b73b9"/>',
    ]
    if spread:
        left = _LABEL_PX + _PLOT_PX * max(bar.value - spread, 0.0) / reach
        parts.append(
            f'<path d="M{left:.1f} {middle}H{end:.1f}M{left:.1f} {middle - 4}v8M{end:.1f} '
            f'{middle - 4}v8" stroke="#d98324" stroke-width="1.5" fill="none"/>'
        )
    text = f"{bar.value:.2f}" + (f" ± {spread:.2f}" if bar.deviation is not None else "")
    parts.append(f'<text x="{end + 8:.1f}" y="{top + 13}">{text}</text>')
    return "".join(parts) + "\n"
