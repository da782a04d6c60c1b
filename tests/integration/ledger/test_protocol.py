"""The lease protocol holds whatever is lost, late, repeated or killed: see tests/model."""

from tests.model.runs import model_server, run


def test_no_run_of_the_model_breaks_an_invariant() -> None:
    with model_server() as machine:
        run(machine, runs=200, steps=50, seed=13)
