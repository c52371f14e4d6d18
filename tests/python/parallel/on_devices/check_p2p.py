"""The transport "p2p" without GPUs: its errors, its exchanges by name, and its layer with XLA's collectives as calls."""

import contextlib
import dataclasses
import functools
import re
from typing import ClassVar

import check_packed
import check_replay
import jax
import jax.numpy as jnp
import numpy as np
import peer_stand_in
import pytest
from jax.sharding import AxisType, Mesh
from meshes import AXIS_TYPES, P, mesh_of, placed, put

from anabranch import _library
from anabranch.jax import Parallel, moe, routed_experts
from anabranch.jax.binding import ffi
from anabranch.jax.parallel import p2p, parallel, peers
from anabranch.jax.parallel.peers import Peers, concrete_mesh, peers_along, reason_against, size_class
from anabranch.lora import NAMES
from lora_cases import as_lora, with_lora
from moe_cases import operands, run_layer
from pairs import pairs
from replay_cases import record
from routed_cases import routed_operands, run_routed

EXPERT_8 = Parallel(expert_axis="expert", transport="p2p")


def layer(parallel, widths=(8, 16), **options):
    given = operands(32, 8, 2, *widths)
    names = ("x", "gate", "w_in", "w_out")
    return moe(**{name: given[name] for name in names}, topk=2, parallel=parallel, **options).output


# ---------------------------------------------------------------- errors


def test_other_devices_than_gpus_are_an_error(axis_type):
    mesh = mesh_of(axis_type, expert=8)
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=r"transport: got 'p2p' on devices .*'cpu', expected GPUs"):
        layer(EXPERT_8)
    with pytest.raises(ValueError, match=r"transport: got 'p2p' on devices of the platform 'cpu', expected GPUs"):
        jax.jit(layer, static_argnums=0)(Parallel(expert_axis="expert", transport="p2p", mesh=mesh))


def test_a_mesh_without_devices_is_an_error():
    abstract = mesh_of(expert=8).abstract_mesh
    given = Parallel(expert_axis="expert", transport="p2p", mesh=abstract)
    with pytest.raises(ValueError, match=r"transport: got 'p2p' without known devices, expected parallel.mesh, or"):
        jax.eval_shape(lambda: layer(given))
    with jax.sharding.use_abstract_mesh(abstract), pytest.raises(ValueError, match="got 'p2p' without known devices"):
        jax.eval_shape(lambda: layer(EXPERT_8))


def test_a_jax_shard_map_around_the_layer_is_an_error():
    stage = jax.shard_map(
        lambda: layer(EXPERT_8), mesh=mesh_of(stage=2, expert=4), in_specs=(), out_specs=P(), axis_names={"stage"}
    )
    with pytest.raises(ValueError, match=r"transport: got 'p2p' inside a jax.shard_map over 'stage', expected moe\(\)"):
        jax.jit(stage)()


class Device:
    """What is read of a GPU."""

    platform = "gpu"

    def __init__(self, number, process=0, local=None):
        self.id, self.process_index, self.local_hardware_id = number, process, number if local is None else local


def group_of(*numbers, **fields):
    return tuple(Device(number, **fields) for number in numbers)


def test_numbers_of_ranks_and_processes(monkeypatch):
    assert reason_against(Peers((group_of(0, 1), group_of(2, 3)))) == ""
    assert reason_against(Peers((group_of(*range(16)),))) == ""
    assert reason_against(Peers((group_of(0),))) == "with 1 devices along expert_axis, expected 2 to 16"
    assert reason_against(Peers((group_of(*range(17)),))) == "with 17 devices along expert_axis, expected 2 to 16"
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    two = group_of(0, process=0) + group_of(1, process=1)
    assert reason_against(Peers((two,))).startswith(
        "on a mesh over the processes [0, 1] of 3, expected devices of this"
    )
    assert reason_against(Peers((two + group_of(2, process=2),))) == ""
    assert reason_against(Peers((group_of(0, 1, process=0),))) == ""
    assert reason_against(Peers((group_of(0, 1, process=1),))) != ""


# ---------------------------------------------------------------- devices and names


def test_the_mesh_of_a_program_is_known_while_it_is_traced():
    mesh, found = mesh_of(expert=4, data=2), []

    def note(x):
        found.append(concrete_mesh(None))
        return x

    with jax.set_mesh(mesh):
        note(0)
        jax.jit(note)(1.0)
        jax.jit(jax.vmap(note))(jnp.ones(2))
        jax.grad(jax.checkpoint(note))(1.0)
        jax.lax.scan(lambda carry, _: (note(carry), None), 1.0, length=2)
    assert len(found) >= 5 and all(one == mesh for one in found)
    other = mesh_of(expert=8)
    assert concrete_mesh(other) == other
    assert concrete_mesh(other.abstract_mesh) is None and concrete_mesh(None) is None


def test_groups_are_the_devices_along_the_axis():
    mesh = mesh_of(data=2, expert=4)
    ids = [[device.id for device in group] for group in peers_along(mesh, "expert").groups]
    assert ids == [[0, 1, 2, 3], [4, 5, 6, 7]]
    ids = [[device.id for device in group] for group in peers_along(mesh, "data").groups]
    assert ids == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_a_name_is_that_of_the_size_class_and_the_devices_in_order():
    assert [size_class(size) for size in (1, 2**20, 2**20 + 1, 2**27, 2**27 + 1)] == [
        2**20, 2**20, 2**21, 2**27, 2**28,
    ]  # fmt: skip
    assert Peers((group_of(0, 1), group_of(2, 3))).name(5) == "1048576 bytes, devices 0,1/2,3"
    assert Peers((group_of(0, 1),)).name(5, 2**21) == "1048576 + 2097152 bytes, devices 0,1"
    names = {Peers(groups).name(size) for size in (1, 2**21) for groups in (
        (group_of(0, 1), group_of(2, 3)), (group_of(1, 0), group_of(2, 3)), (group_of(0, 1, 2, 3),),
        (group_of(2, 3), group_of(0, 1)), (group_of(0, 12, 3),), (group_of(0, 1, 23),),
    )}  # fmt: skip
    assert len(names) == 12


class Exchange:
    """Records what becomes of a PeerExchange."""

    made: ClassVar[list["Exchange"]] = []
    fails_on: ClassVar[int | None] = None

    def __init__(self, device, rank, ranks, sizes):
        self.device, self.rank, self.ranks, self.sizes = device, rank, ranks, sizes
        self.handles, self.names, self.is_closed = None, [], False
        self.made.append(self)

    def handle(self):
        return b"handle %d" % self.device

    def connect(self, handles):
        if self.device == self.fails_on:
            raise NotImplementedError("no peer access")
        self.handles = [handle.rstrip(b"\0") for handle in handles]

    def register(self, name):
        self.names.append(name)

    def close(self):
        self.is_closed = True


@pytest.fixture
def exchanges(monkeypatch):
    """The list of the exchanges that are made instead of PeerExchanges."""
    monkeypatch.setattr(Exchange, "made", [])
    monkeypatch.setattr(peers, "PeerExchange", Exchange)
    monkeypatch.setattr(peers, "_made", {})
    monkeypatch.setattr(peers, "_wait", list)
    return Exchange.made


def test_each_device_gets_one_exchange_per_size_class(exchanges):
    two = Peers((group_of(5, 4), group_of(6, 7)))
    name = two.exchange(100)
    assert two.exchange(2**20) == name
    assert [(e.device, e.rank, e.ranks, e.sizes, e.names) for e in exchanges] == [
        (device, rank, 2, (2**20,), [name]) for device, rank in ((5, 0), (4, 1), (6, 0), (7, 1))
    ]
    assert [e.handles for e in exchanges] == [[b"handle 5", b"handle 4"]] * 2 + [[b"handle 6", b"handle 7"]] * 2
    assert two.exchange(2**20 + 1) != name and len(exchanges) == 8
    assert two.exchange(100, 100, 2**21) != name
    assert [e.sizes for e in exchanges[8:]] == [(2**20, 2**20, 2**21)] * 4
    assert not any(e.is_closed for e in exchanges)


def test_a_device_that_cannot_have_one_is_named(exchanges, monkeypatch):
    monkeypatch.setattr(Exchange, "fails_on", 6)
    two = Peers((group_of(5, 4), group_of(7, 6)))
    with pytest.raises(ValueError, match=r"transport: got 'p2p', which device 6 cannot use: no peer access"):
        two.exchange(100)
    assert len(exchanges) == 4 and all(e.is_closed for e in exchanges)
    monkeypatch.setattr(Exchange, "fails_on", None)
    two.exchange(100)
    assert len(exchanges) == 8 and not any(e.is_closed for e in exchanges[4:])


@pytest.mark.parametrize("case", ["", "a GPU without access", "FP8", "another process", "no devices"])
def test_auto_chooses_it_where_one_process_has_all_gpus(exchanges, monkeypatch, case):
    mesh, group = mesh_of(expert=8), group_of(*range(8), process=1 if case == "another process" else 0)
    monkeypatch.setattr(parallel, "_platform", lambda *_: "gpu")
    monkeypatch.setattr(parallel, "peers_along", lambda *_: Peers((group,)))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(Exchange, "fails_on", 6 if case == "a GPU without access" else None)
    chosen = []
    monkeypatch.setattr(parallel, "choose", lambda *given: chosen.append(given) or "ring")
    given = Parallel(expert_axis="expert", mesh=mesh.abstract_mesh if case == "no devices" else mesh)
    if case == "FP8":
        given = dataclasses.replace(given, fp8_exchange=True)
    options = dict(precision="fp8", widths=(128, 128)) if case == "FP8" else {}
    jax.eval_shape(lambda: layer(given, **options))
    assert [arguments[-1] for arguments in chosen] == [case == ""]


@pytest.mark.parametrize("other_fails", [False, True])
def test_two_processes_of_a_group(exchanges, monkeypatch, other_fails):
    """This is process 0 with the first device of each group. Both processes name their GPU 0."""
    gathered = []

    def process_allgather(rows):
        theirs = np.zeros_like(rows)
        for i in (1, 3):
            handle = b"their handle %d" % i
            theirs[i, : len(handle)] = np.frombuffer(handle, np.uint8)
            if other_fails and gathered:
                theirs[i, peers.HANDLE_BYTES :][:9] = np.frombuffer(b"no memory", np.uint8)
        gathered.append(rows)
        return np.stack([rows, theirs])

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(peers.multihost_utils, "process_allgather", process_allgather)
    groups = [(Device(2 * i, process=0, local=i), Device(2 * i + 1, process=1, local=i)) for i in range(2)]
    two = Peers(tuple(groups))
    with (
        pytest.raises(ValueError, match="which device 1 cannot use: no memory")
        if other_fails
        else contextlib.nullcontext()
    ):
        two.exchange(5)
    assert [(e.device, e.rank) for e in exchanges] == [(0, 0), (1, 0)]
    assert [e.handles for e in exchanges] == [
        [b"handle 0", b"their handle 1"], [b"handle 1", b"their handle 3"],
    ]  # fmt: skip
    assert len(gathered) == 2 and [e.is_closed for e in exchanges] == [other_fails] * 2


# ---------------------------------------------------------------- the layer


class Calls(list):
    """The custom calls. Attribute `sequences`: those that are sequences."""


@pytest.fixture
def calls(monkeypatch):
    """The (operation, names, whether it is ordered after another call) of the custom calls, by XLA's collectives."""
    found, last, sequences = Calls(), [], []
    found.sequences = sequences

    def note(operation, names, order):
        assert not order or order[0] is last[-1]
        found.append((operation, names, bool(order)))

    def call_exchange(operation, x, order, shape, exchange):
        note(operation, (exchange,), order)
        result = peer_stand_in.run_exchange(operation, x)
        assert result.shape == shape
        last.append(jnp.zeros(1, jnp.int32))
        return result, [last[-1]]

    def call_sequence(sequence):
        sequences.append(sequence)
        order = [array for array in sequence.operands if any(array is known for known in last)]
        note("sequence", tuple(sequence.exchanges.values()), order)
        results = peer_stand_in.run_sequence(sequence)
        last.append(results[0])
        return results

    monkeypatch.setattr(p2p, "call_exchange", call_exchange)
    monkeypatch.setattr(ffi, "call_sequence", call_sequence)
    monkeypatch.setattr(parallel, "reason_against", lambda peers: "")
    monkeypatch.setattr(Peers, "exchange", Peers.name)
    jax.clear_caches()
    return found


def both(options, **fields):
    """The parallel layouts of ring and of p2p, with other options of Parallel."""
    return [Parallel(expert_axis="expert", transport=name, **options, **fields) for name in ("ring", "p2p")]


def placed_with(mesh, parallel, shared):
    """As `placed`, also for factors of adapters, of which `shared` belong to all experts."""
    specs, place = parallel.specs(shared=shared), placed(mesh, parallel)
    return lambda name, array: put(mesh, array, *specs[name]) if name in NAMES else place(name, array)


def assert_same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, got, want)


#: Sizes of a mesh, options of Parallel, whether experts are forced.
MESHES = {
    "expert": (dict(expert=8), {}, False),
    "data and capacity": (
        dict(data=2, expert=4), dict(data_axes="data", fsdp_axes="data", capacity_factor=0.8), False,
    ),
    "tensor and forced experts": (
        dict(expert=2, tensor=2, data=2), dict(data_axes="data", tensor_axis="tensor"), True,
    ),
}  # fmt: skip


@pytest.mark.parametrize(*pairs(axis_type=AXIS_TYPES, name=list(MESHES), dtype=["float32", "bfloat16"]))
def test_the_layer_has_the_bits_of_ring(calls, axis_type, name, dtype):
    sizes, options, forced = MESHES[name]
    mesh, arrays = mesh_of(axis_type, **sizes), operands(64, 8, 3, 16, 24, dtype=dtype, bias=True, skew=3.0)
    more = dict(topk=3, aux_loss_coeff=0.3, z_loss_coeff=0.1)
    if forced:
        more["forced_experts"] = np.random.default_rng(3).integers(-1, 8, (64, 3)).astype(np.int32)
    with jax.set_mesh(mesh):
        want, got = (run_layer(arrays, put=placed(mesh, one), parallel=one, **more)[:2] for one in both(options))
    assert_same(got, want)
    # The forward pass is one call, the backward pass two.
    assert [(operation, is_ordered) for operation, _, is_ordered in calls] == [
        ("sequence", False), ("sequence", False), ("sequence", True),
    ]  # fmt: skip
    peers_of_mesh = peers_along(mesh, "expert")
    tokens, small = peers_of_mesh.name(1, 1, 1), peers_of_mesh.name(1)
    assert [names for _, names, _ in calls] == [(tokens, small), (tokens, small), (tokens,)]


def of_both(mesh, run, options, shared=()):
    """The results of `run(parallel, put)` by ring and by p2p, which must have the same bits."""
    with jax.set_mesh(mesh):
        want, got = (run(one, placed_with(mesh, one, shared)) for one in both(options))
    assert_same(got, want)


@pytest.mark.parametrize("shared", [(), ("a_in", "b_out")], ids=["own factors", "shared factors"])
@pytest.mark.parametrize("weight_early", [False, True], ids=["late weights", "early weights"])
def test_adapters(calls, shared, weight_early):
    mesh = mesh_of(data=2, expert=2, tensor=2)
    arrays = with_lora(operands(32, 4, 2, 16, 24, bias=True, skew=2.0, cold=1), ranks=(5, 3), shared=shared)
    options = dict(data_axes="data", fsdp_axes="data", tensor_axis="tensor")
    more = dict(topk=2, lora_scale=(0.7, -1.2), weight_early=weight_early)
    of_both(mesh, lambda one, put: run_layer(arrays, put=put, parallel=one, **more)[:2], options, shared)


@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
def test_layouts_alignment_and_dtypes_of_weights(calls, weights):
    mesh, arrays = mesh_of(expert=4, data=2), operands(64, 8, 3, 16, 24, dtype="bfloat16", bias=True, cold=2)
    arrays |= {name: arrays[name].astype(weights) for name in ("w_in", "w_out")}
    more = dict(topk=3, align_size=8, weight_early=True, w_in_layout="fpd", w_out_layout="df")
    layouts = more["w_in_layout"], more["w_out_layout"]

    def run(one, put):
        return run_layer(arrays, put=placed(mesh, one, *layouts), parallel=one, **more)[:2]

    of_both(mesh, run, dict(data_axes="data"))


@pytest.mark.parametrize("kind,precision", [("mxfp4", "highest"), ("fp8_blocks", "fp8")])
def test_packed_weights(calls, kind, precision):
    """Each half unpacks or reads packed weights; adapters and biases stay plain."""
    mesh = mesh_of(expert=4, data=2)
    arrays, weights = check_packed.arrays_of(kind, 128, 128)

    def run(one, _):
        specs = one.specs(**check_packed.PFD)
        given = {name: put(mesh, array, *specs[name]) for name, array in arrays.items()}
        packed = check_packed.placed(mesh, one, weights)
        return check_packed.gradients(given, packed, parallel=one, precision=precision)

    of_both(mesh, run, dict(data_axes="data"))
    assert [operation for operation, *_ in calls] == ["sequence"] * 3


def test_a_replay(calls):
    """The second call of the router selects the experts to which tokens are sent."""
    mesh, sizes = mesh_of(data=2, expert=4), (check_replay.T, check_replay.E, check_replay.K)
    arrays = operands(*sizes, check_replay.D, check_replay.F)
    more = check_replay.OPTIONS | {"replay": record(*sizes)}
    options = dict(data_axes="data", capacity_factor=0.7)
    of_both(mesh, lambda one, put: run_layer(arrays, put=put, parallel=one, **more)[:2], options)
    assert [operation for operation, *_ in calls] == ["sequence"] * 3


@pytest.mark.parametrize("precision", ["highest", "fp8"])
def test_routed_experts(calls, precision):
    """Experts repeat within a token; with fp8 tokens are quantised where they arrive."""
    mesh, arrays = mesh_of(expert=8), routed_operands(64, 8, 3, 128, 128, dtype="bfloat16", bias=True)
    of_both(mesh, lambda one, put: run_routed(arrays, precision=precision, put=put, parallel=one), {})
    assert {operation for operation, *_ in calls} == {"sequence"}


@pytest.mark.parametrize("precision", ["highest", "fp8"])
@pytest.mark.parametrize("ranks", [(0, 0), (5, 3)], ids=["no adapters", "adapters"])
def test_workspaces_suffice_on_a_gpu(calls, precision, ranks):
    """The C calls of all halves, with the sizes of a layer whose tokens are exchanged by copy engines."""
    try:
        _library.load_cuda()
    except _library.LibraryError as error:
        pytest.skip(f"NO CUDA LIBRARY: its workspaces are not checked: {error}")
    mesh = mesh_of(expert=4)
    arrays = routed_operands(4, 8, 2, 128, 256, dtype="bfloat16", bias=True)
    if any(ranks):
        arrays = with_lora(arrays, ranks=ranks, shared=("a_in",))
    sizes = {"x": (8192, 2048), "experts": (8192, 2), "weights": (8192, 2), "w_in": (8, 2048, 2, 256)}
    sizes |= {"w_out": (8, 256, 2048), "b_out": (8, 2048)}
    if any(ranks):
        sizes |= {"lora_a_in": (1, 2048, 5), "lora_b_out": (8, 3, 2048)}
    given = {n: jax.ShapeDtypeStruct(sizes.get(n, a.shape), a.dtype) for n, a in arrays.items() if a is not None}

    def loss(given):
        main = (given[n] for n in ("x", "experts", "weights", "w_in", "w_out"))
        rest = {n: given[n] for n in ("b_in", "b_out")} | {"lora": as_lora(given)}
        parallel = Parallel(expert_axis="expert", transport="p2p")
        output = routed_experts(*main, **rest, parallel=parallel, precision=precision).output
        return jnp.sum(output.astype(jnp.float32))

    with jax.set_mesh(mesh):
        jax.eval_shape(jax.grad(loss, allow_int=True), given)
    computed = [call for one in calls.sequences for call in one.calls if not call.function.startswith("exchange_")]
    assert len(computed) == 6
    for call in computed:
        assert 0 < peer_stand_in.workspace_on_a_gpu(call, ranks=4) <= call.workspace, call


@pytest.mark.parametrize("name", ["x", "gate", "w_in", "b_in", "w_out", "b_out"])
def test_one_gradient(calls, name):
    """A half computes and sends only what this gradient needs."""
    mesh, arrays = mesh_of(expert=8), operands(32, 8, 2, 16, 24, dtype="bfloat16", bias=True)

    def run(one, put):
        given = {n: put(n, array) for n, array in arrays.items() if n != "gate_bias"}

        def loss(array):
            one_given = given | {name: array}
            named = {n: one_given[n] for n in ("b_in", "b_out")}
            main = (one_given[n] for n in ("x", "gate", "w_in", "w_out"))
            return jnp.sum(jnp.square(moe(*main, **named, topk=2, parallel=one).output.astype(jnp.float32)))

        return jax.jit(jax.value_and_grad(loss))(given[name])

    of_both(mesh, run, {})
    assert len(calls) == (3 if name in ("x", "w_in", "b_in") else 2)


def test_an_fp8_exchange_has_the_bits_of_ring(calls):
    mesh, arrays = mesh_of(expert=8), routed_operands(64, 8, 3, 128, 128, dtype="bfloat16", bias=True)
    with jax.set_mesh(mesh):
        want, got = (
            run_routed(arrays, precision="fp8", put=placed(mesh, one), parallel=one)
            for one in both(dict(fp8_exchange=True))
        )
    assert_same(got, want)
    assert {operation for operation, *_ in calls} == {"all_gather", "all_to_all"}
    assert [is_ordered for *_, is_ordered in calls].count(False) == 2  # the first call of either pass


def test_a_program_is_refused_on_devices_in_another_order(calls):
    """The context's meshes are equal to JAX but for their devices, so the program is traced once."""
    devices = np.array(jax.devices())
    meshes = [Mesh(order, ("expert",), axis_types=(AxisType.Auto,)) for order in (devices, devices[::-1])]
    step = jax.jit(lambda: layer(EXPERT_8))
    with jax.set_mesh(meshes[0]):
        step()
    with jax.set_mesh(meshes[1]), pytest.raises(ValueError, match="incompatible devices for jitted computation"):
        step()


def test_a_program_for_gpus_names_the_exchanges(monkeypatch, axis_type):
    """Lowered, since a GPU would run it: one custom call per half; the last half comes after the one before it."""
    monkeypatch.setattr(parallel, "reason_against", lambda peers: "")
    monkeypatch.setattr(Peers, "exchange", Peers.name)
    jax.clear_caches()
    mesh, arrays = mesh_of(axis_type, expert=8), operands(32, 8, 2, 8, 16)
    names = ("x", "gate", "w_in", "w_out")

    def loss(*given):
        return jnp.sum(jax.checkpoint(functools.partial(moe, topk=2, parallel=EXPERT_8))(*given).output)

    with jax.set_mesh(mesh):
        given = [placed(mesh, EXPERT_8)(name, arrays[name]) for name in names]
        text = jax.jit(jax.grad(loss)).trace(*given).lower(lowering_platforms=("cuda",)).as_text()
    calls = re.findall(r"custom_call @ab_xla_sequence\((.*)", text)
    peers_of_mesh = peers_along(mesh, "expert")
    small, tokens = (f'= "{peers_of_mesh.name(*(1,) * buffers)}"' for buffers in (1, 3))
    assert [(tokens in call, small in call) for call in calls] == [(True, True)] * 2 + [(True, False)]
    started = [call.count(" part = 1") for call in calls]
    waited = [call.count(" part = 2") + call.count("arriving = ") for call in calls]
    returned = [call.count("returning = ") for call in calls]
    assert (started, waited, returned) == ([1, 1, 0], [1, 1, 0], [1, 0, 1])  # x only, so w_in needs no tokens
