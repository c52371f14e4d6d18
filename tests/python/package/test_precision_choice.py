"""`choose_precision`: unsupported FP8, choices that never cost more, and the measured layers."""

import itertools
import pathlib
import re

import pytest

from anabranch.precision_choice import BACKWARD, FORWARD, PASSES, LayerSize, choose_precision

HOPPER = dict(dtype="bfloat16", capability="9.0")
QWEN3 = LayerSize(32768, 2048, 768, 128, 8)
SIZES = [
    QWEN3._replace(T=T, E=E, D=D, F=F)
    for T, E, (D, F) in itertools.product((1, 33, 2048, 65536), (1, 8, 256), ((128, 128), (768, 256), (7168, 2048)))
]


@pytest.mark.parametrize(
    "change, why",
    [
        (dict(capability=None), "capability 9.0"),
        (dict(capability="8.0"), "capability 9.0"),
        (dict(capability="10.0"), "capability 9.0"),
        (dict(dtype="float32"), "x of float32"),
        (dict(D=2880), "D or F of a device"),
        (dict(F=700), "D or F of a device"),
        (dict(width_shards=3), "D or F of a device"),
        (dict(T=0), "an empty layer"),
    ],
)
def test_unsupported_fp8_gives_highest(change, why):
    sizes = {name: value for name, value in change.items() if name in LayerSize._fields}
    options = HOPPER | {name: value for name, value in change.items() if name not in sizes}
    assert choose_precision(QWEN3, **HOPPER).precision == "fp8"
    choice = choose_precision(QWEN3._replace(**sizes), **options)
    assert choice[:3] == ("highest", None, None) and why in choice.why


def test_a_path_that_the_environment_names_has_no_fp8(monkeypatch):
    monkeypatch.setenv("ANABRANCH_CUDA_PATH", "hopper")
    assert choose_precision(QWEN3, **HOPPER).precision == "fp8"
    monkeypatch.setenv("ANABRANCH_CUDA_PATH", "portable")
    choice = choose_precision(QWEN3, **HOPPER)
    assert choice.precision == "highest" and "ANABRANCH_CUDA_PATH" in choice.why


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_kept_weights_and_fewer_passes_never_cost_more(size):
    for weight_bytes in (2, 4):
        times = {
            (kept, passes): choose_precision(size, **HOPPER, weight_bytes=weight_bytes, kept=kept, passes=passes)
            for kept in ((), (FORWARD,), PASSES)
            for passes in ((FORWARD,), PASSES)
        }
        for passes in ((FORWARD,), PASSES):
            assert times[PASSES, passes].fp8 <= times[(FORWARD,), passes].fp8 < times[(), passes].fp8
            assert len({times[kept, passes].highest for kept in ((), (FORWARD,), PASSES)}) == 1
        assert times[PASSES, (FORWARD,)].fp8 == times[(FORWARD,), (FORWARD,)].fp8
        for kept in ((), (FORWARD,), PASSES):
            one, both = times[kept, (FORWARD,)], times[kept, PASSES]
            assert one.fp8 < both.fp8 and one.highest < both.highest
            assert both.precision == ("fp8" if both.fp8 < both.highest else "highest")


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", ["T", "D", "F", "E"])
def test_more_of_anything_takes_longer(size, name):
    if name == "E" and size.T * size.K > 1000 * size.E:
        pytest.skip("tiles are full either way")
    less, more = (choose_precision(of, **HOPPER) for of in (size, size._replace(**{name: 2 * getattr(size, name)})))
    assert less.highest < more.highest and less.fp8 < more.fp8


def test_float32_weights_favour_given_quantised_weights():
    """float32 weights are rounded in every pass, quantised ones are not."""
    in_16_bits, in_32_bits = (choose_precision(QWEN3, **HOPPER, weight_bytes=size, kept=PASSES) for size in (2, 4))
    assert in_32_bits.fp8 == in_16_bits.fp8 and in_32_bits.highest > in_16_bits.highest


def test_passes_are_named():
    assert PASSES == (FORWARD, BACKWARD)


def _measured():
    """(size, passes, kept, ms by precision) of the table in docs/performance.md#fp8."""
    text = (pathlib.Path(__file__).parents[3] / "docs/performance.md").read_text()
    rows = re.findall(r"^\| (\d+(?:,\d+){4}) \|(.*)\|$", text.split("\n## FP8\n")[1].split("\n## ")[0], re.M)
    found = {}
    for shape, cells in rows:
        times = [float(re.match(r" *([\d.]+)", cell)[1]) for cell in cells.split("|") if re.match(r" *[\d.]+", cell)]
        for i, passes in enumerate(((FORWARD,), PASSES)):
            for j, kept in enumerate(((), PASSES)):
                found[shape, passes, kept] = times[i], times[2 + 2 * j + i]
    assert len(found) >= 6 * 4
    return found.items()


@pytest.mark.parametrize("case, times", _measured(), ids=lambda value: str(value))
def test_measured_layers_are_predicted_and_chosen_right(case, times):
    """A wrong choice is allowed only if both times differ by less than the model's error."""
    shape, passes, kept = case
    highest, fp8 = times
    choice = choose_precision(LayerSize(*map(int, shape.split(","))), **HOPPER, passes=passes, kept=kept)
    assert 1e3 * choice.highest == pytest.approx(highest, rel=0.05)
    assert 1e3 * choice.fp8 == pytest.approx(fp8, rel=0.05)
    if abs(fp8 / highest - 1) > 0.03:
        assert choice.precision == ("fp8" if fp8 < highest else "highest")
