"""Does a measured profile belong to this machine and this model? No torch."""

from megatron_hdp.cost.profile import LayerProfile, Profile
from megatron_hdp.cost.settings import ranks_of_node
from megatron_hdp.errors import ConfigError

MEASURED = "measured by megatron-hdp profile"
"""First of a measured profile's sources; others name a paper, a data sheet or a person's own measurements."""


def layer_name(
    *,
    hidden: int,
    ffn: int,
    heads: int,
    kv_heads: int,
    head_size: int,
    gated: bool,
    experts: tuple[int, int] | None,
    element_bytes: int,
    tensor_parallel: int,
    latent: tuple[int | None, int] | None = None,
) -> str:
    """Name of a layer: the sizes that its times depend on most, the elements' width and the tensor-parallel size.

    Two layers of the same name can still differ in time by what it leaves out: sequence parallelism, the kind of norm,
    biases, windows, recompute, kernels, how experts are spread; and the vocabulary, on which loss and embedding depend.

    ``experts`` is (experts, chosen per token), ``latent`` the ranks that queries (None: they are not compressed) and
    keys and values of latent attention are compressed to.
    """
    mixture = "" if experts is None else f"-e{experts[0]}k{experts[1]}"
    glu = "-glu" if gated else ""
    compressed = "" if latent is None else f"-l{latent[0] or 0}x{latent[1]}"
    attention = f"q{heads}x{head_size}-kv{kv_heads}{compressed}"
    return f"h{hidden}-f{ffn}{glu}{mixture}-{attention}-{8 * element_bytes}bit-tp{tensor_parallel}"


def check_profile(
    profile: Profile, hardware: str, layer: str, *, given: str | None = None, force: bool = False
) -> str | None:
    """Is ``profile`` of this hardware (`machine.hardware`) and this model (`layer_name`)? ``given`` is what
    --hdp-profile says, if not the profile's own name.

    Shipped and hand-written profiles pass: they name their source and are chosen with open eyes. Returns None if all is
    well, or a line to log where ``force`` lets another one pass.

    Raises:
        ConfigError: a measured profile of another machine or model, and no ``force``.
    """
    if not is_measured(profile):
        return None
    wrong = []
    if profile.hardware != hardware:
        wrong.append(f"it was measured on {profile.hardware!r}, this rank is {hardware!r}")
    if layer not in profile.layers:
        wrong.append(f"it was measured for layer {', '.join(profile.layers)}, this model has {layer}")
    if not wrong:
        return None
    name = profile.name if given in (None, profile.name) else f"{given} (profile {profile.name})"
    found = f"--hdp-profile {name}: {'; '.join(wrong)}"
    if force:
        return f"WARNING: {found}; used all the same, as asked"
    raise ConfigError(
        f"{found}. Plans would balance work that does not exist: measure again with `torchrun ... -m megatron_hdp "
        "profile SCRIPT ARGS`, or use it all the same with --hdp-force-profile"
    )


def check_nodes(profile: Profile, layer: LayerProfile, processes: int) -> str | None:
    """A line to log where a measured profile knows nodes of another size than ``processes``, those of this machine;
    ``layer`` is the one that is planned with. None if all is well, or the profile was not measured."""
    known = profile.gpus_per_node
    if not is_measured(profile) or known == processes:
        return None
    ranks = ranks_of_node(profile, layer)
    return (
        f"profile {profile.name} was measured with {known} processes on a node, this one has {processes}: plans "
        f"believe in nodes of {ranks} pool rank{'s' * (ranks > 1)}, and cost rings by that"
    )


def is_measured(profile: Profile) -> bool:
    """Was it written by `profile`, and not by hand or from a paper?"""
    return bool(profile.sources) and profile.sources[0] == MEASURED
