"""Names of phases in profiles: those of C and Python agree, and docs/profiling.md explains each."""

import pathlib
import re

from anabranch import phases
from anabranch.torch.binding import calls

ROOT = pathlib.Path(__file__).parents[3]
#: Ranges of operations that are no phase of a layer.
OPERATIONS = {"dispatch", "combine", "combine_backward", "aux_loss", "grouped_matmul"}
#: Phases of front ends alone: the gate's GEMMs are torch's and XLA's, and `experts` is a call with several phases.
OF_FRONT_ENDS = {"gate", "gate_backward", "experts"}


def test_the_ranges_of_the_cuda_library_have_the_names_of_the_phases():
    header = (ROOT / "src/core/range.h").read_text()
    (enumerators,) = re.findall(r"enum class Phase[^{]*\{(.*?)\};", header, re.S)
    (names,) = re.findall(r"kPhaseNames = \{(.*?)\};", header, re.S)
    enumerated, named = re.findall(r"\w+", enumerators), re.findall(r'"(\w+)"', names)
    assert enumerated == named
    expected = {name.removeprefix(phases.PREFIX) for name in phases.NAMES}
    assert set(named) == expected - OF_FRONT_ENDS | OPERATIONS


def test_the_guide_explains_every_phase():
    table = (ROOT / "docs/profiling.md").read_text()
    explained = re.findall(r"^\| `(anabranch/\w+)` \|", table, re.M)
    assert explained == list(phases.NAMES)


def test_a_call_with_several_phases_has_no_name():
    assert phases.phase_of("expert_ffn_forward", ["x", "y"], {}) is None
    assert phases.phase_of("expert_ffn_backward", ["h", "dx_rows"], {}) is None
    every = {phases.phase_of(name, ["x"], {"backward": b}) for name in vars(calls) for b in (0, 1)}
    every |= {phases.phase_of("expert_ffn_backward", ["h"], {})}
    assert every - {None} == set(phases.NAMES) - {phases.PREFIX + name for name in OF_FRONT_ENDS}
