"""Expert parallelism and FSDP2 for models of Hugging Face Transformers, in one call.

Experts are sharded over the dimension "expert" of a mesh, and everything else by FSDP2 over all of its ranks. Each rank
keeps its own batch; tokens travel to their experts as in `routed_experts` with a group.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from anabranch._text import shown
from anabranch.torch.binding import check
from anabranch.torch.parallel.parallel import check_parallel, sharded
from anabranch.torch.transformers.adapter import NAME, register
from anabranch.torch.transformers.expert_group import ExpertGroup, group_of, share
from anabranch.torch.transformers.experts_module import described, experts_modules, is_packed_experts, model_name
from anabranch.torch.transformers.weights_on_ranks import Holders, holders, load_from_first_rank, materialise

if TYPE_CHECKING:  # some builds of torch lack it
    from torch.distributed import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

Model = TypeVar("Model", bound=nn.Module)

#: The names of the mesh dimensions, from the outer to the inner one. Ranks with neighbouring numbers share experts.
DATA, EXPERT = "data", "expert"


def parallelize(
    model: Model,
    mesh: "DeviceMesh",
    *,
    transport: str = "auto",
    capacity_factor: float | None = None,
    equal_tokens: bool = False,
    reshard_after_forward: bool = True,
    mp_policy: "MixedPrecisionPolicy | None" = None,
) -> Model:
    """Shards a model of Transformers in place for training on all ranks of a mesh, and returns it.

    The experts of every MoE layer are sharded over the mesh dimension "expert": rank r of P holds E/P experts. FSDP2
    shards all other parameters over all ranks of the mesh, one unit per decoder layer. With a dimension "data", several
    groups of P ranks hold the same experts, and FSDP2 shards these over "data" too. Every rank passes its own batch to
    the model. The model gets the experts implementation "anabranch".

    Call it on all ranks after `get_peft_model` and before an optimizer is made. Parameters become DTensors with their
    names and global shapes, so `torch.distributed.checkpoint` saves and loads them on any number of ranks.

    Args:
      model: a model of Transformers, or PEFT's model of one. All ranks pass equal weights: from one checkpoint, or from
        one seed. To load a checkpoint without a copy per rank, load it on rank 0 of the mesh only, and make the model
        on the meta device on the others: then the weights of rank 0 are sent to their ranks. If all ranks pass a model
        whose parameters (not buffers) are on the meta device, the parameters are NaN until a checkpoint is loaded.
      mesh: all ranks of the default process group, with the dimensions ("expert",) or ("data", "expert").
      transport, capacity_factor: as in `moe`. Without a capacity factor no assignment is dropped.
      equal_tokens: whether batches of all ranks have the same number of tokens in every call. If not, the hosts of a
        group's ranks exchange their numbers in every layer, and ranks with fewer tokens compute with padding.
      reshard_after_forward: whether FSDP2 frees gathered parameters between the forward and the backward pass. After a
        forward pass without gradients it always frees them.
      mp_policy: FSDP2's mixed precision; `output_dtype` is that of the model's outputs. Experts that are not sharded
        over "data" are not gathered. Their float32 weights are rounded in the layer, with float32 gradients.

    Returns:
      `model` itself.

    Raises:
      TypeError: an argument has a wrong type.
      ValueError: an argument has a wrong value, E or a size is no multiple of the number of ranks, ranks pass different
        weights, or embeddings that the configuration ties are not tied.
      NotImplementedError: a model without experts of the interface, with packed experts, with a norm of every expert's
        output, with trained parameters of two dtypes in one module, or whose parameters are sharded already.

    Gradients: of the mean of the ranks' losses, for every parameter. With equal numbers of labels per rank this is the
    gradient of the mean loss over all tokens. Transformers computes its load-balancing loss from the tokens of one
    rank. Source: docs/torch.md, "Expert parallelism".
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {check.describe(model)}, expected a torch.nn.Module")
    data, expert, every = _meshes(mesh)
    check_parallel(expert.get_group(), transport, capacity_factor, False, 0)
    for name, value in (("equal_tokens", equal_tokens), ("reshard_after_forward", reshard_after_forward)):
        check.boolean(name, value)
    _check_policy(mp_policy)
    base: Any = model
    if hasattr(model, "get_base_model"):
        base = base.get_base_model()
    if not hasattr(base, "set_experts_implementation"):
        raise TypeError(f"model: got a {type(base).__name__}, expected a model of Transformers")
    register()  # with PEFT's adapters, which need whole weights otherwise
    base.set_experts_implementation(NAME)
    modules = {path: module for path, module in experts_modules(model).items() if not hasattr(module, "base_layer")}
    for path, module in modules.items():
        _check_experts(path, module, expert.size(), data)
    _check_plain(model)
    _check_tied(base)
    layers = _decoder_layers(model, base)
    _check_dtypes(model, layers)
    held = holders(model)
    whole = model.state_dict() if held is Holders.FIRST_RANK else {}

    group, hosts = _groups(expert, mesh, with_hosts=not equal_tokens)
    options = dict(transport=transport, capacity_factor=capacity_factor)
    share_of = ExpertGroup(group, hosts, options)
    _fully_shard(model, base, modules, layers, (data, expert, every), mp_policy, reshard_after_forward)
    for module in modules.values():
        share(module, share_of)
    if held is not Holders.ALL_RANKS:
        materialise(model, expert.device_type, from_first_rank=held is Holders.FIRST_RANK)
    if held is Holders.FIRST_RANK:
        load_from_first_rank(model, whole)
    return model


# ---------------------------------------------------------------- checks


def _meshes(mesh: Any) -> tuple[Any, Any, Any]:
    """(mesh of "data" or None, mesh of "expert", mesh of all ranks with one dimension)."""
    if not (dist.is_available() and isinstance(mesh, dist.DeviceMesh)):
        raise TypeError(f"mesh: got {check.describe(mesh)}, expected a torch.distributed.DeviceMesh")
    names = mesh.mesh_dim_names
    if names not in ((EXPERT,), (DATA, EXPERT)):
        raise ValueError(
            f"mesh: got dimensions {shown(names)}, expected ({EXPERT!r},) or ({DATA!r}, {EXPERT!r}) in this order"
        )
    if mesh.size() != dist.get_world_size():
        raise ValueError(f"mesh: got {mesh.size()} ranks, expected all {dist.get_world_size()}")
    if names == (EXPERT,):
        return None, mesh, mesh
    # A dimension of size 1 would only cost copies.
    data = mesh[DATA] if mesh[DATA].size() > 1 else None
    return data, mesh[EXPERT], dist.init_device_mesh(mesh.device_type, (mesh.size(),), mesh_dim_names=("fsdp",))


def _check_policy(value: Any) -> None:
    """Raises TypeError if the value is neither a MixedPrecisionPolicy nor None."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if value is not None and not isinstance(value, MixedPrecisionPolicy):
        raise TypeError(f"mp_policy: got {check.describe(value)}, expected a MixedPrecisionPolicy of FSDP2 or None")


def _decoder_layers(model: nn.Module, base: Any) -> list[nn.Module]:
    """The units of FSDP2, inner ones first: the modules that Transformers keeps on one device."""
    names = set(getattr(base, "_no_split_modules", None) or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise NotImplementedError(
            f"model: got {model_name(base)}, which names no decoder layers in _no_split_modules, expected a model that "
            "does"
        )
    return layers[::-1]


def _check_experts(path: str, module: nn.Module, ranks: int, data: Any) -> None:
    """Checks that the experts of a module can be sharded.

    Raises:
      NotImplementedError: the module has packed weights or a norm of every expert's output, or is sharded already.
      ValueError: a size is no multiple of the number of ranks.
    """
    if is_packed_experts(module):
        raise NotImplementedError(f"{path}: got packed weights, expected float weights")
    if group_of(module) is not None:
        raise NotImplementedError(f"{path}: got experts that parallelize has sharded already, expected a new model")
    if described(module).post_expert_norm:
        raise NotImplementedError(f"{path}: got a norm of every expert's output, expected none")
    for name, value in module.named_parameters(recurse=False):
        if value.shape[0] % ranks:
            raise ValueError(
                f"{path}.{name}: got {value.shape[0]} experts, expected a multiple of the {ranks} ranks of {EXPERT!r}"
            )
        if data is not None and _axis(module, ranks, data.size()) == 1 and value.shape[1] % data.size():
            raise ValueError(
                f"{path}.{name}: got {list(value.shape)}, expected experts per rank or a second axis that are a "
                f"multiple of the {data.size()} ranks of {DATA!r}"
            )


def _check_plain(model: nn.Module) -> None:
    """Checks that parameters are neither sharded nor quantised."""
    for name, value in model.named_parameters():
        if hasattr(type(value), "__tensor_flatten__"):
            raise NotImplementedError(
                f"{name}: got a {type(value).__name__}, expected a plain tensor: parallelize shards all parameters"
            )
        if not (value.is_floating_point() and value.dtype.itemsize > 1):
            raise NotImplementedError(f"{name}: got {value.dtype}, expected a float of 16 bits or more")


def _trained(module: nn.Module, recurse: bool = True) -> Iterator[Tensor]:
    """The trained parameters that are no DTensors yet."""
    return (value for value in module.parameters(recurse) if value.requires_grad and type(value) is nn.Parameter)


def _check_dtypes(model: nn.Module, layers: list[nn.Module]) -> None:
    """Checks that modules of another dtype than the rest of their unit of FSDP2 can be a unit, see `_of_other_dtypes`.

    Raises:
      NotImplementedError: such a module, with all modules inside it, has trained parameters of several dtypes.
    """
    paths = {module: path for path, module in model.named_modules()}
    for unit in (*layers, model):
        for dtype, modules in _of_other_dtypes(unit).items():
            for module in modules:
                found = {value.dtype for value in _trained(module)}
                if found != {dtype}:
                    dtypes = " and ".join(sorted(map(str, found)))
                    raise NotImplementedError(
                        f"{paths[module] or 'model'}: got trained parameters of {dtypes} in one module, expected one "
                        "dtype: FSDP2 cannot shard them together"
                    )


def _check_tied(base: Any) -> None:
    """Raises ValueError if the configuration ties embeddings that are not tied: they would be trained apart."""
    first, last = base.get_input_embeddings(), base.get_output_embeddings()
    tied = getattr(base.config.get_text_config(), "tie_word_embeddings", False)
    if tied and type(first) is nn.Embedding and type(last) is nn.Linear and first.weight is not last.weight:
        raise ValueError(
            "model: got output embeddings of their own with tie_word_embeddings=True, expected tied ones: call "
            "model.tie_weights() first"
        )


# ---------------------------------------------------------------- sharding


def _groups(expert: Any, mesh: Any, *, with_hosts: bool) -> tuple[Any, Any]:
    """(process group of the exchange, its group on the CPU or None).

    The group of the exchange is not that of FSDP2: collectives of one group wait for each other.
    """
    rows = mesh.mesh.reshape(-1, expert.size()).tolist()
    group, _ = dist.new_subgroups_by_enumeration(rows)
    return group, dist.new_subgroups_by_enumeration(rows, backend="gloo")[0] if with_hosts else None


def _axis(module: nn.Module, ranks: int, data: int) -> int:
    """The axis of the weights along which FSDP2 shards them over "data".

    Parts along the first axis are gathered without a copy. FSDP2 would pad them to equal sizes, and torch 2.9 assembles
    padded ones in a wrong order.
    """
    experts = next(module.parameters(recurse=False)).shape[0]
    return 0 if experts // ranks % data == 0 else 1


def _shard_experts(module: nn.Module, expert: Any) -> Iterator[nn.Parameter]:
    """Replaces the weights of all experts by DTensors that hold this rank's experts."""
    rank = expert.get_local_rank()
    device = torch.device(expert.device_type)
    for name, value in list(module.named_parameters(recurse=False)):
        local = value.shape[0] // expert.size()
        mine: Tensor = value.detach()[rank * local : (rank + 1) * local].clone()
        mine = mine if value.is_meta else mine.to(device)
        setattr(module, name, nn.Parameter(sharded(mine, expert), requires_grad=value.requires_grad))
        yield getattr(module, name)


def _constant(value: Any) -> Callable[[Any], Any]:
    return lambda _: value


def _of_other_dtypes(unit: nn.Module) -> Mapping[torch.dtype, list[nn.Module]]:
    """The modules of a unit whose own trained parameters have another dtype than most of the unit, by dtype.

    Transformers keeps the routers of some models in float32. FSDP2 requires one dtype per unit.
    """
    sizes: collections.Counter[torch.dtype] = collections.Counter()
    for value in _trained(unit):
        sizes[value.dtype] += value.numel()
    most = max(sizes, key=sizes.__getitem__, default=None)
    modules: dict[torch.dtype, list[nn.Module]] = {}
    for module in unit.modules():
        for dtype in {value.dtype for value in _trained(module, recurse=False)} - {most}:
            modules.setdefault(dtype, []).append(module)
    return modules


def _free_without_gradients(model: Any, _: Any) -> None:
    """Sets that a forward pass frees gathered parameters if no backward pass follows, which would free them."""
    model.set_reshard_after_forward(not torch.is_grad_enabled())


def _fully_shard(
    model: nn.Module,
    base: Any,
    modules: dict[str, nn.Module],
    layers: list[nn.Module],
    meshes: tuple[Any, Any, Any],
    mp_policy: "MixedPrecisionPolicy | None",
    reshard: bool,
) -> None:
    """Shards the experts, then all other parameters per decoder layer."""
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
    from torch.distributed.tensor import Shard

    data, expert, every = meshes
    # FSDP2 leaves the parameters of the outermost unit gathered unless this is passed.
    options: dict[str, Any] = dict(reshard_after_forward=reshard)
    inner = options
    if mp_policy is not None:
        inner = options | dict(mp_policy=dataclasses.replace(mp_policy, output_dtype=None))
        options = options | dict(mp_policy=mp_policy)
    ignored = set()
    for module in modules.values():
        parameters = set(_shard_experts(module, expert))
        if data is None:
            # The group's ranks have averaged these gradients. FSDP2 must not shard them a second time.
            ignored |= parameters
            continue
        placement = Shard(_axis(module, expert.size(), data.size()))
        fully_shard(module, mesh=data, shard_placement_fn=_constant(placement), **inner)
    over_all: dict[str, Any] = dict(mesh=every, ignored_params=ignored)
    embedding = base.get_input_embeddings()
    if embedding is not None and not getattr(base.config.get_text_config(), "tie_word_embeddings", False):
        fully_shard(embedding, **over_all, **inner)
    for unit in (*layers, model):
        for others in _of_other_dtypes(unit).values():
            fully_shard(others, **over_all, **inner)
        fully_shard(unit, **over_all, **(options if unit is model else inner))
    if not reshard:
        model.register_forward_pre_hook(_free_without_gradients)
    if model is not base:  # generate of PEFT's model calls the base model, not PEFT's
        register_fsdp_forward_method(model, "generate")
