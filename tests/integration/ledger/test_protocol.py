"""The lease protocol holds whatever is lost, late, repeated or killed: see tests/model."""

from tests.model.faults import IN_CI
from tests.model.runs import model_server, run


def test_no_run_of_the_model_breaks_an_invariant() -> None:
    with model_server() as machine:
        run(machine, IN_CI, runs=150, steps=50, seed=13)
