"""Sums of promised starts that have ended."""

from collections import deque
from typing import Any

from services.api.reports import promises
from services.api.reports.promises import PERIOD_S, PromiseJournal
from shared.model.leases.preemption import EndedPromise, PromiseOutcome
from shared.model.names import Namespace

NOW = 10 * PERIOD_S
KEPT = PromiseOutcome.KEPT
WITHDRAWN = PromiseOutcome.WITHDRAWN


def promise(
    outcome: PromiseOutcome, *, known_s: float = 60.0, at: float = NOW, namespace: str = "a"
) -> EndedPromise:
    return EndedPromise(
        at=at, namespace=Namespace(namespace), outcome=outcome, opened_at=at - known_s
    )


class StoredPromises:
    """The ledger's journal, of which each reading returns two entries at most."""

    def __init__(self, *ended: EndedPromise) -> None:
        self.ended = ended

    async def promises(self, after: str) -> tuple[str, list[EndedPromise]]:
        begin = int(after.partition("-")[0])
        page = [*self.ended[begin : begin + 2]]
        return f"{begin + len(page)}-0" if page else after, page


async def journal_of(*ended: EndedPromise) -> PromiseJournal:
    journal = PromiseJournal()
    store: Any = StoredPromises(*ended)
    await journal.read(store)
    return journal


async def test_how_early_kept_promises_were_known_is_what_half_and_nine_of_ten_had() -> None:
    known_s = (900.0, 100.0, 500.0, *(1_000.0,) * 7)
    journal = await journal_of(*(promise(KEPT, known_s=known) for known in known_s))

    total = journal.view(lambda _: True, NOW, None, None).total

    assert (total.kept, total.half_known_s, total.most_known_s) == (10, 1_000.0, 100.0)
    assert total.kept_percent == 100.0


async def test_one_withdrawn_promise_is_never_rounded_away() -> None:
    journal = await journal_of(promise(WITHDRAWN), *(promise(KEPT) for _ in range(4_999)))

    assert journal.view(lambda _: True, NOW, None, None).total.kept_percent == 99.9


async def test_what_ended_earlier_and_what_others_were_promised_does_not_count() -> None:
    journal = await journal_of(
        promise(KEPT, at=NOW - PERIOD_S - 1),
        promise(KEPT, namespace="theirs"),
        promise(WITHDRAWN, at=NOW - 5),
    )

    view = journal.view(lambda namespace: namespace == "a", NOW, None, None)
    earlier = journal.view(lambda _: True, NOW, NOW - 2 * PERIOD_S, NOW - PERIOD_S)

    assert [sums.namespace for sums in view.namespaces] == ["a"]
    assert (view.total.kept, view.total.withdrawn, view.total.kept_percent) == (0, 1, 0.0)
    assert (view.total.half_known_s, view.total.most_known_s) == (None, None)
    assert (earlier.total.kept, earlier.total.withdrawn) == (1, 0)


async def test_a_period_begins_where_records_begin_if_older_ones_are_dropped(
    monkeypatch: Any,
) -> None:
    monkeypatch.setattr(promises, "MOST_PROMISES", 3)
    journal = await journal_of(*(promise(KEPT, at=NOW - age) for age in (50, 40, 30, 20)))
    journal._ended = deque(journal._ended, maxlen=3)

    view = journal.view(lambda _: True, NOW, None, None)

    assert (view.start, view.total.kept) == (NOW - 40, 3)
