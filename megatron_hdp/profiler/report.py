"""The report of a measurement, for the terminal. No torch."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_hdp.cost.profile import Profile
from megatron_hdp.errors import ConfigError
from megatron_hdp.profiler.assemble import Fits
from megatron_hdp.profiler.cases import Case
from megatron_hdp.profiler.fit import POOR_R2, POOR_UNSEEN, Fit, Transfers, Unseen
from megatron_hdp.profiler.samples import OUTLIER, Measured

_UNEQUAL = 1.1
"""Ranks whose times differ by more than this are named."""


@dataclass(frozen=True, kw_only=True)
class Findings:
    """All that the report shows beside the profile."""

    measured: tuple[Measured, ...]
    left_out: tuple[Case, ...]
    fits: Fits
    unseen: tuple[Unseen, ...]
    transfers: tuple[Transfers, ...]
    clock: str
    seconds: float
    """Of the whole measurement."""

    @property
    def all_fits(self) -> tuple[Fit, ...]:
        """Every fit that was made."""
        fits = self.fits
        found = (*fits.layer.attention, fits.layer.layer, fits.activations, fits.loss, fits.embedding)
        return (*(fit for fit in found if fit is not None), *(each.fit for each in self.transfers))


def render(profile: Profile, findings: Findings) -> str:
    """Everything that was measured and fitted, the test on unseen micro-batches, and warnings."""
    lines = [
        f"megatron_hdp profile of layer {profile.default_layer}",
        f"  {profile.hardware}; {profile.software}",
        f"  {findings.clock}; medians of repeats; {findings.seconds:.0f} s",
        "",
        *_times(findings.measured, findings.fits),
        "",
        "fits (coefficients >= 0, least squares of relative errors)",
        *(f"  {fit.what}: {fit.quality}" for fit in findings.all_fits),
        "",
        *_transfers(findings.transfers),
        *_copies(profile),
        "",
        *_unseen(findings.unseen),
    ]
    if findings.left_out:
        names = ", ".join(f"{case.kind} {case.shown}" for case in findings.left_out)
        lines.append(f"left out for want of time or memory: {names}")
    return "\n".join([*lines, *_warnings(findings)])


def deliver(profile: Profile, findings: Findings, out: str) -> None:
    """Print the report, then write the profile to ``out``.

    Raises ConfigError if it cannot be written; it is printed then, so that nothing of the measurement is lost.
    """
    print(render(profile, findings), flush=True)
    try:
        profile.save(out)
    except OSError as error:
        print(f"\nthe profile, for a file of your own:\n\n{profile.to_json()}", flush=True)
        raise ConfigError(
            f"profile: --out {out} cannot be written: {error.strerror or error}; the profile is printed above"
        ) from error
    print(f"\nwritten to {out}: train with --hdp-profile {out}", flush=True)


def median_error(unseen: Sequence[Unseen]) -> float | None:
    """Median relative error of the micro-batches that the fit did not see; None if there are none."""
    return statistics.median(item.error for item in unseen) if unseen else None


def _times(measured: Sequence[Measured], fits: Fits) -> list[str]:
    head = f"  {'part':<10}{'micro-batch':>20}{'forward':>12}{'backward':>12}{'fit':>9}{'repeats':>9}  outliers"
    lines = [f"times in ms, layers for one layer; outliers took more than {OUTLIER} times their median", head]
    for item in measured:
        forward, backward = item.seconds
        fitted = ""
        if item.case.kind == "layers":
            fitted = f"{100 * (sum(fits.layer.seconds(item.case.lengths)) / (forward + backward) - 1):+.1f} %"
        odd = f"{item.outliers}, worst {item.worst:.1f} x" if item.outliers else "none"
        lines.append(
            f"  {item.case.kind:<10}{item.case.shown:>20}{1e3 * forward:>12.3f}{1e3 * backward:>12.3f}{fitted:>9}"
            f"{item.repeats:>9}  {odd}"
        )
    return lines


def _transfers(transfers: Sequence[Transfers]) -> list[str]:
    lines = []
    for found in transfers:
        latency, per_byte = found.fit.coefficients
        speed = "no limit seen" if per_byte <= 0 else f"{1e-9 / per_byte:.2f} GB/s each way"
        lines.append(f"transfers {found.where}, rings of {found.ranks} ranks: {1e6 * latency:.1f} us, {speed}")
        lines.append(
            "  " + ", ".join(f"{size} B {1e6 * s:.0f} us" for size, s in zip(found.sizes, found.seconds, strict=True))
        )
    return lines or ["transfers: not measured, a single rank has no neighbour"]


def _copies(profile: Profile) -> list[str]:
    alone = f"{profile.d2h_bandwidth / 1e9:.2f} GB/s out, {profile.h2d_bandwidth / 1e9:.2f} GB/s back"
    if profile.d2h_bandwidth_shared is None or profile.h2d_bandwidth_shared is None:
        return [f"copies to host memory: {alone}"]
    beside = f"{profile.d2h_bandwidth_shared / 1e9:.2f} GB/s out, {profile.h2d_bandwidth_shared / 1e9:.2f} GB/s back"
    return [f"copies to host memory: {alone}; beside a ring exchange {beside}"]


def _unseen(unseen: Sequence[Unseen]) -> list[str]:
    median = median_error(unseen)
    if median is None:
        return ["no micro-batches were left to test the fit with"]
    lines = [f"micro-batches that the fit did not see: median error {100 * median:.1f} %"]
    for item in unseen:
        error = 100 * (item.predicted / item.measured - 1)
        lines.append(
            f"  {item.case.shown:>20}: predicted {1e3 * item.predicted:.3f} ms, measured {1e3 * item.measured:.3f} ms, "
            f"{error:+.1f} %"
        )
    return lines


def _warnings(findings: Findings) -> list[str]:
    lines = [
        f"WARNING: poor fit of {fit.what} (R2 below {POOR_R2}, or an error above {100 * fit.tolerance:.0f} %): measure "
        "on a quiet machine, with more --seconds"
        for fit in findings.all_fits
        if fit.is_poor
    ]
    median = median_error(findings.unseen)
    if median is not None and median > POOR_UNSEEN:
        lines.append(
            f"WARNING: unseen micro-batches are predicted with a median error of {100 * median:.1f} %, more than "
            f"{100 * POOR_UNSEEN:.0f} %"
        )
    unequal = [item for item in findings.measured if item.spread > _UNEQUAL and item.case.kind == "layers"]
    if unequal:
        worst = max(unequal, key=lambda item: item.spread)
        lines.append(
            f"WARNING: ranks differ: {worst.case.shown} took {worst.spread:.2f} times as long on the slowest rank as "
            "on the fastest; the profile has their median"
        )
    return lines
