"""ResourceQuotas: validation, enforcement, and status."""

from collections.abc import Iterator

from shared.model.errors import RequestError
from simcluster.apimachinery.errors import ApiError, Cause
from simcluster.apimachinery.names import is_qualified
from simcluster.apimachinery.objects import Json, at_path, json_text, name_of, namespace_of
from simcluster.apimachinery.resources import Resource
from simcluster.apiserver.kinds.quantities import (
    Amounts,
    Quantity,
    add_amounts,
    parse_amounts,
    quantity,
)
from simcluster.apiserver.kinds.quota_usage import SCOPES, missing_amounts, pod_usage, quota_matches
from simcluster.apiserver.storage.records import ObjectChange
from simcluster.apiserver.storage.store import ObjectStore

TABLE = "resourcequotas"
_ONE = parse_amounts({"": "1"})[""]


class QuotaAccount:
    """One quota, and the usage that is charged to it."""

    def __init__(self, quota: Json) -> None:
        self.quota = quota
        self.hard = parse_amounts(at_path(quota, "spec.hard") or {})
        self.used: Amounts = {}

    def charge(self, amount: Amounts, *, sign: int) -> None:
        """Add an object's usage, or subtract it."""
        for name in self.hard:
            if name in amount:
                before = self.used.get(name, Quantity())
                self.used[name] = before + amount[name] if sign > 0 else before - amount[name]

    def status(self) -> Json:
        """Return the quota's status."""
        return {
            "hard": {name: str(quantity) for name, quantity in self.hard.items()},
            "used": {name: str(self.used.get(name, Quantity())) for name in self.hard},
        }


class QuotaController:
    """Checks writes against the quotas of their namespace, and updates their status."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._accounts: dict[str, dict[str, QuotaAccount]] = {}
        store.listeners.append(self._on_change)
        store.admission_checks.append(self.check)
        for quota in store.list(TABLE):
            self._open_account(quota)

    def check(self, kind: Resource, old: Json | None, new: Json) -> None:
        """Refuse with 403 what exceeds a quota, or lacks a resource that a quota requires."""
        accounts = self._accounts.get(namespace_of(new))
        if not accounts:
            return
        for name, account in sorted(accounts.items()):
            was = {} if old is None else self._usage(account, kind, old)
            now = self._usage(account, kind, new)
            self._check_specified(account, kind, new)
            increase = {key: quantity - was.get(key, Quantity()) for key, quantity in now.items()}
            detail = _exceeded(
                account, {key: quantity for key, quantity in increase.items() if quantity.value > 0}
            )
            if detail:
                text = f"exceeded quota: {name}, {detail}"
                raise ApiError.forbidden(kind.qualified, name_of(new), text)

    def _check_specified(self, account: QuotaAccount, kind: Resource, new: Json) -> None:
        if kind.table == "pods" and quota_matches(account.quota, new):
            missing = missing_amounts(account.hard, new)
            if missing:
                text = f"failed quota: {name_of(account.quota)}: {missing}"
                raise ApiError.forbidden("pods", name_of(new), text)

    @staticmethod
    def _usage(account: QuotaAccount, kind: Resource, obj: Json) -> Amounts:
        """Return an object's usage in one quota; quotas with scopes count pods only."""
        if kind.table == "pods":
            counted = pod_usage(obj) if quota_matches(account.quota, obj) else {}
        elif at_path(account.quota, "spec.scopes") or at_path(account.quota, "spec.scopeSelector"):
            counted = {}
        else:
            counted = dict.fromkeys((kind.table, f"count/{kind.qualified}"), _ONE)
        return {name: quantity for name, quantity in counted.items() if name in account.hard}

    def _on_change(self, kind: Resource, change: ObjectChange) -> None:
        opened = self._on_quota(change) if kind.table == TABLE else None
        accounts = self._accounts.get(namespace_of(change.latest.obj))
        if not accounts:
            return
        for account in list(accounts.values()):
            if account is opened:
                continue
            before = {} if change.before is None else self._usage(account, kind, change.before.obj)
            after = {} if change.after is None else self._usage(account, kind, change.after.obj)
            if before != after:
                account.charge(before, sign=-1)
                account.charge(after, sign=1)
                self._write_status(account)

    def _on_quota(self, change: ObjectChange) -> QuotaAccount | None:
        """Handle a change of a quota; return its account if it was recounted."""
        quota = change.latest.obj
        accounts = self._accounts.setdefault(namespace_of(quota), {})
        if change.after is None:
            accounts.pop(name_of(quota), None)
        elif change.before is None or change.before.obj.get("spec") != quota.get("spec"):
            return self._open_account(quota)
        elif name_of(quota) in accounts:
            accounts[name_of(quota)].quota = quota
        return None

    def _open_account(self, quota: Json) -> QuotaAccount:
        """Charge all objects of the namespace to a quota."""
        account = QuotaAccount(quota)
        self._accounts.setdefault(namespace_of(quota), {})[name_of(quota)] = account
        for kind, obj in self._store.list_namespace(namespace_of(quota)):
            account.charge(self._usage(account, kind, obj), sign=1)
        self._write_status(account)
        return account

    def _write_status(self, account: QuotaAccount) -> None:
        """Write the quota's status if it has changed."""
        quota = account.quota
        record = self._store.find(TABLE, namespace_of(quota), name_of(quota))
        if record is not None and record.obj.get("status") != account.status():
            changed = {**record.obj, "status": account.status()}
            self._store.update(TABLE, changed, subresource="status")


def _exceeded(account: QuotaAccount, increase: Amounts) -> str:
    after = add_amounts(account.used, increase)
    exceeded = sorted(name for name in increase if after[name].value > account.hard[name].value)
    if not exceeded:
        return ""
    lists = {"requested": increase, "used": account.used, "limited": account.hard}
    return ", ".join(
        f"{label}: " + ",".join(f"{name}={listed.get(name, Quantity())}" for name in exceeded)
        for label, listed in lists.items()
    )


_OPERATORS = ("In", "NotIn", "Exists", "DoesNotExist")
_SCOPES = (*SCOPES, "PriorityClass")


def quota_causes(quota: Json) -> Iterator[Cause]:
    """Validate names, amounts and scopes."""
    for name, amount in (at_path(quota, "spec.hard") or {}).items():
        yield from _amount_causes(name, amount, f"spec.hard[{name}]")
    scopes = [(name, "Exists") for name in at_path(quota, "spec.scopes") or ()]
    expressions = at_path(quota, "spec.scopeSelector.matchExpressions") or ()
    scopes += [
        (expression.get("scopeName"), expression.get("operator")) for expression in expressions
    ]
    for scope, operator in scopes:
        if scope not in _SCOPES:
            text = f"Invalid value: {json_text(scope)}: unsupported scope"
            yield Cause("FieldValueInvalid", text, "spec.scopes")
        elif operator not in _OPERATORS or (scope in SCOPES and operator != "Exists"):
            text = f"Invalid value: {json_text(operator)}: must be 'Exist' when scope is {scope}"
            yield Cause("FieldValueInvalid", text, "spec.scopeSelector.matchExpressions")


def _amount_causes(name: str, amount: str, path: str) -> Iterator[Cause]:
    if not is_qualified(name.removeprefix("requests.").removeprefix("limits.")):
        text = f"Invalid value: {json_text(name)}: not a qualified name"
        yield Cause("FieldValueInvalid", text, path)
    try:
        negative = quantity(amount).value < 0
    except RequestError as error:
        yield Cause("FieldValueInvalid", f"Invalid value: {json_text(amount)}: {error}", path)
    else:
        if negative:
            text = f"Invalid value: {json_text(amount)}: must be greater than or equal to 0"
            yield Cause("FieldValueInvalid", text, path)
