"""The API server and the services decide by the same rules which objects of our kinds are valid."""

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from services.cli.up.installation import KINDS
from services.timekeeper.config import budget_spec
from shared.kubernetes.kinds import gpu_quotas
from shared.kubernetes.kinds.custom_kinds import API_VERSION, by_namespace
from shared.model.errors import RequestError
from simcluster.apiserver.crd.custom_kinds import custom_kinds
from simcluster.apiserver.crd.custom_object_strategy import CustomObjectStrategy
from simcluster.apiserver.registry import open_store
from tests.support.effort import tries

Spec = Mapping[str, Any]
BUDGET = budget_spec.KIND
QUOTA = gpu_quotas.KIND
STORE = open_store()


def strategy_of(file: str) -> CustomObjectStrategy:
    stored, _ = custom_kinds(yaml.safe_load(KINDS.joinpath(file).read_text()))
    return CustomObjectStrategy(stored)


STRATEGIES = {BUDGET: strategy_of("gpubudgets.yaml"), QUOTA: strategy_of("gpuquotas.yaml")}


def api_server_faults(kind: str, spec: object, name: str = "team-a") -> str:
    """Evaluate the definition, with its CEL rules."""
    item = {
        "apiVersion": API_VERSION,
        "kind": kind,
        "metadata": {"name": name},
        "spec": copy.deepcopy(spec),
    }
    STRATEGIES[kind].apply_defaults(item, STORE)
    causes = STRATEGIES[kind].validate(item)
    return "; ".join(f"{cause.field}: {cause.message}" for cause in causes)


def our_fault(kind: str, spec: object, name: str = "team-a") -> str:
    item = {"apiVersion": API_VERSION, "kind": kind, "metadata": {"name": name}, "spec": spec}
    try:
        if kind == BUDGET:
            by_namespace([item], kind, budget_spec.parse_spec)
        else:
            by_namespace([item], kind, gpu_quotas.parse_spec)
    except RequestError as error:
        return str(error)
    return ""


MEMORY = "must be a quantity of bytes such as 160Gi or 160G, not 160GB or 160"
ZONE = "must be the IANA name of a time zone such as UTC, Europe/Berlin or Asia/Shanghai"
LABEL = "must be the key of a label such as nvidia.com/gpu.product"
RUN_TIME = "must be hours, minutes and seconds such as 8h, 90m or 2h30m"
IN_WORDS: tuple[tuple[str, Spec, str, str], ...] = (
    (QUOTA, {"maxMemory": "160GB"}, "maxMemory", MEMORY),
    (QUOTA, {"models": [{"name": "T4", "maxMemory": "160GB"}]}, "models[0].maxMemory", MEMORY),
    (QUOTA, {"modelLabel": "GPU model"}, "modelLabel", LABEL),
    (QUOTA, {"poolLabel": ""}, "poolLabel", LABEL),
    (QUOTA, {"pools": ["a pool"]}, "pools", "must be values of a label such as training"),
    (QUOTA, {"defaultRunTime": "8 h", "maxRunTime": "24h"}, "defaultRunTime", RUN_TIME),
    (QUOTA, {"maxRunTime": "1d"}, "maxRunTime", RUN_TIME),
    (BUDGET, {"policy": {"timeZone": "UTC+8"}}, "policy.timeZone", ZONE),
    (BUDGET, {"limitMoney": {"amount": "1,5", "currency": "EUR"}}, "limitMoney.amount",
     "must be money such as 1000 or 1000.50"),
    (BUDGET, {"limitMoney": {"amount": 1, "currency": "euro"}}, "limitMoney.currency",
     "must be three capital letters such as EUR"),
)  # fmt: skip
SMALL = ({"maxMemory": each} for each in (80, "80", "1000k", "500m", 1048575, "0.5Mi"))
MONEY: dict[str, Any] = {"limitMoney": {"amount": 1, "currency": "EUR"}}
INVALID: tuple[tuple[str, Spec, str], ...] = (
    (BUDGET, {"limitGPUMinutes": -1}, "limitGPUMinutes"),
    (BUDGET, {"limitGPUMinutes": 153_722_867_281}, "limitGPUMinutes"),
    (BUDGET, {"warnAt": [101]}, "warnAt"),
    (BUDGET, {"share": 0}, "share"),
    (BUDGET, {"policy": {"type": "lunar"}}, "policy.type"),
    *(
        (BUDGET, more | {"policy": policy}, fault)
        for more, policy, fault in (
            ({}, {"type": "bucket", "refillGPUMinutesPerHour": 1}, "require limitGPUMinutes"),
            ({"limitGPUMinutes": 1}, {"type": "bucket"}, "bucket require each other"),
            ({}, {"refillGPUMinutesPerHour": 1}, "bucket require each other"),
            ({}, {"lengthHours": 20, "bucketMinutes": 1}, "1 to 1000 times bucketMinutes"),
            ({}, {"lengthHours": 2**40}, "lengthHours"),
            ({}, {"type": "sliding", "rollover": {}}, "rollover requires type fixed"),
            ({}, {"rollover": {"maxGPUMinutes": 1}}, "maxGPUMinutes requires percent"),
            ({}, {"rollover": {"percent": 101}}, "percent"),
        )
    ),
    *((BUDGET, {each: 5}, "require limitGPUMinutes") for each in
      ("debtLimitGPUMinutes", "hysteresisGPUMinutes")),
    *((BUDGET, {"limitMoney": {"amount": each, "currency": "EUR"}}, "limitMoney.amount") for each in
      (-1, "-1", "1.234", "1e3", "NaN", 2_562_047_789, "")),
    (BUDGET, {"limitMoney": {"amount": 1, "currency": "euro"}}, "limitMoney.currency"),
    (BUDGET, {"limitMoney": {"amount": 1}}, "currency"),
    *((BUDGET, {**MONEY, **each}, "excludes amounts of GPU-minutes") for each in
      ({"limitGPUMinutes": 1}, {"policy": {"rollover": {"percent": 1, "maxGPUMinutes": 1}}})),
    (BUDGET, {"onDebt": {"action": "evict"}}, "evict requires debtLimitGPUMinutes"),
    *((BUDGET, {"policy": {"timeZone": each}}, "timeZone") for each in
      ("CST", "Asia/Beijing", "UTC+8", "+08:00", "Local", "localtime", "", "../UTC", "u" * 65)),
    *((QUOTA, each, MEMORY) for each in SMALL),
    (QUOTA, {"models": [{"name": "T4", "maxMemory": "80"}]}, MEMORY),
    (QUOTA, {"maxMemory": "80 apples"}, "maxMemory"),
    *((QUOTA, {"maxMemory": each}, "maxMemory") for each in ("NaN", "-1Gi", -1, " 1Gi", "1e308")),
    (QUOTA, {"maxCards": -1}, "maxCards"),
    (QUOTA, {"models": [{"name": "T4"}, {"name": "T4"}]}, "models"),
    (QUOTA, {"models": [{"maxCards": 1}]}, "name"),
    (QUOTA, {"models": [{"name": f"m{n}"} for n in range(65)]}, "models"),
    (QUOTA, {"modelLabel": "GPU model"}, "modelLabel"),
    (QUOTA, {"poolLabel": ""}, "poolLabel"),
    (QUOTA, {"pools": ["p" * 64]}, "pools"),
)  # fmt: skip


@pytest.mark.parametrize(("kind", "spec", "fault"), INVALID, ids=lambda each: str(each)[:60])
def test_an_invalid_object_is_refused_by_the_api_server_and_in_a_file(
    kind: str, spec: Spec, fault: str
) -> None:
    assert fault in api_server_faults(kind, spec)
    assert fault in our_fault(kind, spec)


@pytest.mark.parametrize(("kind", "spec", "field", "words"), IN_WORDS, ids=lambda it: str(it)[:40])
def test_a_field_with_a_form_is_refused_in_words_with_an_example(
    kind: str, spec: Spec, field: str, words: str
) -> None:
    by_the_api_server = api_server_faults(kind, spec)

    assert by_the_api_server.startswith(f"spec.{field}: Invalid value: ")
    assert words in by_the_api_server
    assert "[" not in by_the_api_server.replace(f"spec.{field}", "", 1).replace('["a pool"]', "")
    assert f"spec.{field}: {words}" in our_fault(kind, spec)


@pytest.mark.parametrize("name", ["", "a.b", "a" * 64, "Team"])
def test_the_name_of_an_object_is_that_of_a_namespace(name: str) -> None:
    for kind in STRATEGIES:
        assert "metadata.name" in api_server_faults(kind, {}, name)
        assert "must be the name of a namespace" in our_fault(kind, {}, name)
        assert our_fault(kind, {}, "*") == ""


def maybe(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Spec]:
    return st.fixed_dictionaries({}, optional=fields)


amounts = st.sampled_from([0, 1, 90, -1, 2**63 - 1, "x"])
zones = st.sampled_from(["UTC", "Europe/Berlin", "Etc/GMT+8", "EST5EDT", "CST", "GMT0", "Z\n"])
budgets = maybe(
    limitGPUMinutes=amounts,
    limitMoney=maybe(
        amount=st.sampled_from([0, 1, "1.50", "1.505", -1, 10**12, "x"]),
        currency=st.sampled_from(["EUR", "E", "eur"]),
    ),
    debtLimitGPUMinutes=amounts,
    hysteresisGPUMinutes=amounts,
    warnAt=st.lists(st.integers(0, 101), max_size=11),
    uncappedCorePercent=st.sampled_from([0, 100, 101]),
    onExhausted=st.sampled_from(["deny", "evict", "stop"]),
    onDebt=maybe(action=st.sampled_from(["none", "evict", "stop"]), graceMinutes=amounts),
    policy=maybe(
        type=st.sampled_from(["fixed", "sliding", "bucket", "none"]),
        timeZone=zones,
        rollover=maybe(percent=st.sampled_from([0, 100, 101]), maxGPUMinutes=amounts),
        lengthHours=st.sampled_from([0, 1, 17, 168, 175_680]),
        bucketMinutes=st.sampled_from([1, 60, 61, 44_640]),
        refillGPUMinutesPerHour=amounts,
    ),
)
quantities = st.from_regex(r"\A[ +-]?[0-9]{0,4}[.]?[0-9]{1,4}(Ki|Mi|G|k|m|e[0-9])?\Z")
limits = {
    "maxMilliGPU": amounts,
    "maxMemory": quantities | st.integers(-1, 2**21),
    "maxCards": amounts,
}
labels = st.sampled_from(["", "a", "a.b/c", "-a", "a/b/c", "gpu model", "x" * 64])
models = st.lists(maybe(name=labels, **limits), max_size=3)
quotas = maybe(models=models, pools=st.lists(labels), modelLabel=labels, **limits)


@settings(max_examples=tries(300), deadline=None)
@given(st.tuples(st.just(BUDGET), budgets) | st.tuples(st.just(QUOTA), quotas))
def test_the_api_server_accepts_what_the_services_do(case: tuple[str, Spec]) -> None:
    refused = api_server_faults(*case)
    ours = our_fault(*case)

    assert bool(refused) == bool(ours), (refused, ours)
