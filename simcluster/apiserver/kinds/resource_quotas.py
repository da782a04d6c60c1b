"""ResourceQuotas in force: refuse what would exceed one, and keep their status."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from shared.model.errors import RequestError
from simcluster.apimachinery.errors import ApiError, Cause
from simcluster.apimachinery.names import is_qualified
from simcluster.apimachinery.objects import Json, at_path, name_of, namespace_of, shown
from simcluster.apimachinery.resources import Resource
from simcluster.apiserver.kinds.quantities import Amounts, Quantity, added, amounts, quantity
from simcluster.apiserver.kinds.quota_usage import SCOPES, matches, unspecified, usage
from simcluster.apiserver.storage.records import Change
from simcluster.apiserver.storage.store import Store

TABLE = "resourcequotas"


_ONE = amounts({"": "1"})[""]


@dataclass(slots=True)
class Account:
    """One quota, and what is charged to it so far."""

    quota: Json
    hard: Amounts
    used: Amounts = field(default_factory=dict)

    def charge(self, amount: Amounts, *, sign: int) -> None:
        """Add an object's usage, or take it back."""
        for name in self.hard:
            if name in amount:
                before = self.used.get(name, Quantity())
                self.used[name] = before + amount[name] if sign > 0 else before - amount[name]

    def status(self) -> Json:
        """Return the quota's status."""
        return {
            "hard": {name: str(each) for name, each in self.hard.items()},
            "used": {name: str(self.used.get(name, Quantity())) for name in self.hard},
        }


class Quotas:
    """Watches the store; asked before every write of something that a quota may count."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._accounts: dict[str, dict[str, Account]] = {}
        store.listeners.append(self._on_change)
        store.gates.append(self.check)
        for quota in store.list(TABLE):
            self._open(quota)

    def check(self, kind: Resource, old: Json | None, new: Json) -> None:
        """Refuse with 403 what would exceed a quota, or does not say what a quota must know."""
        accounts = self._accounts.get(namespace_of(new))
        if not accounts:
            return
        for name, account in sorted(accounts.items()):
            was = {} if old is None else self._counted(account, kind, old)
            now = self._counted(account, kind, new)
            self._demand(account, kind, new)
            rise = {key: each - was.get(key, Quantity()) for key, each in now.items()}
            why = _exceeded(account, {key: each for key, each in rise.items() if each.value > 0})
            if why:
                text = f"exceeded quota: {name}, {why}"
                raise ApiError.forbidden(kind.qualified, name_of(new), text)

    def _demand(self, account: Account, kind: Resource, new: Json) -> None:
        if kind.table == "pods" and matches(account.quota, new):
            lacking = unspecified(account.hard, new)
            if lacking:
                text = f"failed quota: {name_of(account.quota)}: {lacking}"
                raise ApiError.forbidden("pods", name_of(new), text)

    @staticmethod
    def _counted(account: Account, kind: Resource, obj: Json) -> Amounts:
        """Return what an object counts against one quota; objects without scopes are counted."""
        if kind.table == "pods":
            counted = usage(obj) if matches(account.quota, obj) else {}
        elif at_path(account.quota, "spec.scopes") or at_path(account.quota, "spec.scopeSelector"):
            counted = {}
        else:
            counted = dict.fromkeys((kind.table, f"count/{kind.qualified}"), _ONE)
        return {name: each for name, each in counted.items() if name in account.hard}

    def _on_change(self, kind: Resource, change: Change) -> None:
        opened = self._on_quota(change) if kind.table == TABLE else None
        accounts = self._accounts.get(namespace_of(change.last.obj))
        if not accounts:
            return
        for account in list(accounts.values()):
            if account is opened:
                continue
            before = (
                {} if change.before is None else self._counted(account, kind, change.before.obj)
            )
            after = {} if change.after is None else self._counted(account, kind, change.after.obj)
            if before != after:
                account.charge(before, sign=-1)
                account.charge(after, sign=1)
                self._show(account)

    def _on_quota(self, change: Change) -> Account | None:
        """Follow a quota's own changes; returns its account where that was counted afresh."""
        quota = change.last.obj
        accounts = self._accounts.setdefault(namespace_of(quota), {})
        if change.after is None:
            accounts.pop(name_of(quota), None)
        elif change.before is None or change.before.obj.get("spec") != quota.get("spec"):
            return self._open(quota)
        elif name_of(quota) in accounts:
            accounts[name_of(quota)].quota = quota
        return None

    def _open(self, quota: Json) -> Account:
        """Count everything there is against a quota."""
        account = Account(quota, amounts(at_path(quota, "spec.hard") or {}))
        self._accounts.setdefault(namespace_of(quota), {})[name_of(quota)] = account
        for kind, obj in self._store.everything_in(namespace_of(quota)):
            account.charge(self._counted(account, kind, obj), sign=1)
        self._show(account)
        return account

    def _show(self, account: Account) -> None:
        """Write the quota's status where it has changed."""
        quota = account.quota
        found = self._store.find(TABLE, namespace_of(quota), name_of(quota))
        if found is not None and found.obj.get("status") != account.status():
            changed = {**found.obj, "status": account.status()}
            self._store.update(TABLE, changed, subresource="status")


def _exceeded(account: Account, rise: Amounts) -> str:
    after = added(account.used, rise)
    over = sorted(name for name in rise if after[name].value > account.hard[name].value)
    if not over:
        return ""
    lists = {"requested": rise, "used": account.used, "limited": account.hard}
    return ", ".join(
        f"{word}: " + ",".join(f"{name}={listed.get(name, Quantity())}" for name in over)
        for word, listed in lists.items()
    )


_OPERATORS = ("In", "NotIn", "Exists", "DoesNotExist")


_SCOPES = (*SCOPES, "PriorityClass")


def quota_causes(quota: Json) -> Iterator[Cause]:
    """Check names, amounts and scopes."""
    for name, amount in (at_path(quota, "spec.hard") or {}).items():
        where = f"spec.hard[{name}]"
        if not is_qualified(name.removeprefix("requests.").removeprefix("limits.")):
            text = f"Invalid value: {shown(name)}: not a qualified name"
            yield Cause("FieldValueInvalid", text, where)
        try:
            negative = quantity(amount).value < 0
        except RequestError as error:
            yield Cause("FieldValueInvalid", f"Invalid value: {shown(amount)}: {error}", where)
        else:
            if negative:
                text = f"Invalid value: {shown(amount)}: must be greater than or equal to 0"
                yield Cause("FieldValueInvalid", text, where)
    scopes = [(name, "Exists") for name in at_path(quota, "spec.scopes") or ()]
    expressions = at_path(quota, "spec.scopeSelector.matchExpressions") or ()
    for scope, operator in [
        *scopes,
        *((e.get("scopeName"), e.get("operator")) for e in expressions),
    ]:
        if scope not in _SCOPES:
            text = f"Invalid value: {shown(scope)}: unsupported scope"
            yield Cause("FieldValueInvalid", text, "spec.scopes")
        elif operator not in _OPERATORS or (scope in SCOPES and operator != "Exists"):
            text = f"Invalid value: {shown(operator)}: must be 'Exist' when scope is {scope}"
            yield Cause("FieldValueInvalid", text, "spec.scopeSelector.matchExpressions")
