"""Runs state machines of hypothesis on real servers."""

from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from tests.support.effort import tries


def run_machine(machine: type[RuleBasedStateMachine], *, examples: int, steps: int) -> None:
    """Run so many examples of so many steps, however long a server takes for one."""
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=tries(examples),
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
