"""Write the shipped profiles from published figures and data sheets, and print what they reproduce.

python benchmarks/profiles.py [--check]    --check writes nothing and fails if a file differs from its calibration
"""

import sys
from pathlib import Path

import megatron_hdp
from megatron_hdp.cost import CostModel, Profile
from megatron_hdp.cost import calibrate as c

FOLDER = Path(megatron_hdp.__file__).parent / "profiles"


def report(profile: Profile) -> None:
    one = CostModel(profile, 1)
    print("Figure 18a, one layer, forward                         paper     model")
    static = one.packed_attention_picoseconds([262144] * 8, 256, phase="forward") * 1e-9
    ring = one.attention_picoseconds(312 * 1024, 39, phase="forward") * 1e-9
    print(f"  static ring of 256, eight sequences of 256K           405     {static:7.1f} ms")
    print(f"  ring of 39, one sequence of 312K                      110     {ring:7.1f} ms")
    print(f"  share of the ring in the static micro-batch          97.6     {100 * static / (static + 10):7.2f} %")
    print("Figure 18b, static, 8 micro-batches of 8 x 256K, 32 layers; nothing was fitted to it")
    for recompute in ("none", "full"):
        whole = CostModel(profile, 32, recompute=recompute)
        rest = whole.picoseconds(8192) - whole.attention_picoseconds(8192)  # a rank's 8192 tokens outside the rings
        step_s = 8e-12 * (whole.packed_attention_picoseconds([262144] * 8, 256) + rest)
        print(f"  recompute {recompute}                                        520     {step_s:7.1f} s")
    print("Figure 6a, one layer, forward, ms")
    layer = CostModel(profile, 1, layer="figure-6a")
    for kilo, (attention, mlp) in c.FIGURE_6A.items():
        model = 1e-9 * (layer.picoseconds(1024 * kilo, phase="forward") + layer.microbatch_picoseconds("forward"))
        print(f"  {kilo:4}K {attention + mlp:7.1f} {model:9.2f}   {100 * (model / (attention + mlp) - 1):+5.1f} %")
    print("Figure 21, 64K tokens, 32 layers                 s            GB")
    rest, _ = c.fit_figure_21_memory()
    for r, seconds in c.FIGURE_21_SECONDS.items():
        print(f"  offload {r:3}            {seconds:6.2f} {step(profile, r):6.2f}   "
              f"{c.FIGURE_21_GB[r]:6.1f} {(rest + memory(profile, r)) / 1e9:6.1f}")  # fmt: skip
    print(f"  full recompute         {c.FIGURE_21_RECOMPUTE_SECONDS:6.2f} {step(profile, 0, 'full'):6.2f}   "
          f"{c.FIGURE_21_RECOMPUTE_GB:6.1f} {(rest + memory(profile, 0, 'full')) / 1e9:6.1f}")  # fmt: skip


def step(profile: Profile, offload: float, recompute: str = "none") -> float:
    model = CostModel(profile, c.LAYERS_7B, layer="figure-21", recompute=recompute)
    stall = model.offload_stall_picoseconds(c.FIGURE_21_TOKENS, offload=offload)
    return 1e-12 * (model.picoseconds(c.FIGURE_21_TOKENS) + model.microbatch_picoseconds() + stall)


def memory(profile: Profile, offload: float, recompute: str = "none") -> int:
    model = CostModel(profile, c.LAYERS_7B, layer="figure-21", recompute=recompute)
    return int(model.bytes(c.FIGURE_21_TOKENS, 1, offload))


def main() -> int:
    differing = []
    for profile in (c.bytescale(), c.h100()):
        path = FOLDER / f"{profile.name}.json"
        if "--check" not in sys.argv[1:]:
            profile.save(path)
            print(f"wrote {path.name}")
        elif path.read_text(encoding="utf-8") != profile.to_json():
            differing.append(path.name)
    report(c.bytescale())
    if differing:
        print(f"differs from its calibration: {', '.join(differing)}: run python {sys.argv[0]}", file=sys.stderr)
    return len(differing)


if __name__ == "__main__":
    sys.exit(main())
