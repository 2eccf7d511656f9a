"""Single charts of a report as PNG files."""

import json
from collections.abc import Sequence
from pathlib import Path

from megatron_hdp.errors import ConfigError
from megatron_hdp.report.browser import opened

_WIDTH = 860
"""Pixels of a picture; twice as many in the file, for sharp screens."""
_BOX = """(() => {
  const box = document.getElementById(NAME).getBoundingClientRect();
  return {x: box.x + scrollX - 10, y: box.y + scrollY - 10, width: box.width + 20, height: box.height + 20};
})()"""
"""JavaScript: where a chart is on the page, with a margin."""


def write_pngs(report: Path, folder: Path, names: Sequence[str]) -> list[Path]:
    """Draw the charts of a report file, each with its heading, into ``folder``/NAME.png.

    Raises:
        ConfigError: no Chromium, or the folder cannot be written.
    """
    written = []
    with opened(report, _WIDTH, scale=2) as browser:
        browser.evaluate("document.documentElement.classList.add('bare')")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name in names:
                box = browser.evaluate(_BOX.replace("NAME", json.dumps(name)))
                out = folder / f"{name}.png"
                out.write_bytes(browser.screenshot(box))
                written.append(out)
        except OSError as error:
            raise ConfigError(f"--png {folder}: cannot be written ({error.strerror})") from error
    return written
