"""What `megatron-hdp report` does: read inputs, write the page, and pictures and traces where they are asked for."""

import datetime
from collections.abc import Sequence
from pathlib import Path

from megatron_hdp.errors import ConfigError, PlanError
from megatron_hdp.plan_flags import check_output, own_words
from megatron_hdp.report.browser import NO_BROWSER, find_chromium
from megatron_hdp.report.build import parts_of
from megatron_hdp.report.chart import Part
from megatron_hdp.report.flags import PlanSetting, ReportFlags
from megatron_hdp.report.from_plan import simulated
from megatron_hdp.report.inputs import Input, PlanFile, SimulationFile, read_input
from megatron_hdp.report.page import names, render
from megatron_hdp.simulator.files import Simulation, whole_file
from megatron_hdp.simulator.trace import write_trace

_TITLE = "Hybrid Data Parallelism: a report"


def run(flags: ReportFlags) -> None:
    """The whole command, with its errors in words of its flags.

    Raises:
        ConfigError, DataError, PlanError: as `report`.
    """
    try:
        report(flags.inputs, flags.out, setting=flags.setting, title=flags.title, png=flags.png, trace=flags.trace)
    except (ConfigError, PlanError) as error:  # of inputs speaks DataError, and of flags of training runs
        raise type(error)(own_words(str(error))) from error


def report(
    inputs: Sequence[Path],
    out: Path,
    *,
    setting: PlanSetting,
    title: str | None = None,
    png: Path | None = None,
    trace: Path | None = None,
) -> None:
    """Read ``inputs``, write the page ``out``, and a PNG of every chart and a trace where asked for.

    Raises:
        ConfigError: nothing is given, a file cannot be written, or what a flag needs is not installed.
        DataError: an input cannot be read or shown.
        PlanError: a plan cannot be simulated.
    """
    if not inputs:
        raise ConfigError("report: give a plan, a simulation, or the log of a training run")
    _check_outputs(inputs, out, png, trace)
    given = [read_input(path) for path in inputs]
    shown = None if trace is None else _simulation(given, setting)
    parts = parts_of(given, setting)
    text = render(parts, title or _title(parts), datetime.date.today().isoformat())
    try:
        with whole_file(out) as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be written ({error.strerror})") from error
    print(f"written: {out} ({len(text) / 1e6:.1f} MB, {len(names(parts))} charts)")
    if png is not None:
        from megatron_hdp.report.png import write_pngs

        written = write_pngs(out, png, names(parts))
        print(f"written: {len(written)} pictures in {png}")
    if trace is not None and shown is not None:
        stages = shown.setting.get("stages", 1)
        write_trace(shown.runs, stages if type(stages) is int and stages > 0 else 1, trace)
        print(f"written: {trace} (open it in ui.perfetto.dev or chrome://tracing)")


def _check_outputs(inputs: Sequence[Path], out: Path, png: Path | None, trace: Path | None) -> None:
    """Refuse what cannot be written, or would overwrite something else that is read or written here."""
    check_output("--out", out)
    check_output("--trace", trace)
    read = {path.resolve(): f"the input {path}" for path in inputs}
    for flag, path in (("--out", out), ("--trace", trace)):
        if path is None:
            continue
        place = path.resolve()
        if place in read:
            raise ConfigError(f"{flag} is {read[place]}, which it would overwrite: give another name")
        read[place] = f"{flag} {path}"
    if png is not None and find_chromium() is None:
        raise ConfigError(NO_BROWSER)
    if png is not None and png.exists() and not png.is_dir():
        raise ConfigError(f"--png {png}: is a file: give a folder")


def _title(parts: Sequence[Part]) -> str:
    return (parts[0].title if len(parts) == 1 else "") or _TITLE


def _simulation(given: Sequence[Input], setting: PlanSetting) -> Simulation:
    """The first one, or the first plan's. Raises ConfigError if there is none."""
    for one in given:
        if isinstance(one, SimulationFile):
            return one.simulation
        if isinstance(one, PlanFile):
            return simulated(one, setting)
    raise ConfigError("--trace: give a simulation or a plan, which have timelines")
