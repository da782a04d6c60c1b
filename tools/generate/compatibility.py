"""Tables of the dialects, and tests/checklists.md: the tests of each requirement."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping

from shared.dialects import DIALECTS
from shared.dialects.vocabulary import WORDS
from shared.model.change import Place
from tools.generate.pages import ROOT, filled

CHECKLISTS = ROOT / "tests" / "checklists.md"
LISTS: Mapping[str, range] = {
    "item": range(1, 52),
    "koordinator": range(1, 35),
    "gpusharing": range(1, 39),
    "hami_core": range(1, 45),
    "extender": range(1, 18),
    "claims": range(18, 41),
    "enforcers": range(1, 59),
    "words": range(1, 39),
}
"""Items of each checklist; a test of an item has its number in its name."""

ELSEWHERE: Mapping[str, Mapping[int, tuple[str, ...]]] = {
    "item": {
        **dict.fromkeys(
            (19, 20, 21),
            ("test_items_19_to_21_a_share_has_the_requested_memory",),
        ),
        32: (
            "test_a_placement_is_bound_once_with_all_annotations_after_its_lease_is_published",
            "test_the_lease_of_a_pod_that_cannot_be_bound_is_released",
        ),
        36: ("test_32_a_pod_that_sets_a_reserved_variable_is_refused_by_its_name",),
        41: ("test_41_a_mounted_file_keeps_its_inode",),
        51: ("test_hami_core_1_every_field_that_c_wrote_is_read",),
    },
    "koordinator": {
        22: ("test_an_empty_ledger_is_restored_from_agents_and_pods",),
        23: ("test_the_lease_of_a_pod_deleted_by_force_ends_when_its_agent_confirms",),
        24: ("test_a_placement_is_bound_once_with_all_annotations_after_its_lease_is_published",),
    },
    "gpusharing": {
        10: (
            "test_gpu_admissions_config_map_means_cores_by_node_label",
            "test_a_pod_goes_to_the_model_of_which_its_namespace_has_quota_left",
        ),
        **dict.fromkeys((13, 15), ("test_gpusharing_12_and_14_every_total_is_exact",)),
    },
    "hami_core": {
        16: ("test_16_registers_with_a_kubelet_that_dials_back_inside_the_call",),
        17: (
            "test_17_registers_within_a_second_of_the_kubelets_socket_being_replaced",
            "test_18_registers_again_on_a_fresh_socket_once_the_kubelet_has_lost_it",
        ),
        18: ("test_18_registers_again_on_a_fresh_socket_once_the_kubelet_has_lost_it",),
        19: (
            "test_no_list_of_sixteen_devices_of_192_gib_nears_the_kubelets_limit",
            "test_17_too_many_units_end_the_start_with_the_factor_needed",
        ),
        20: ("test_ids_never_change_when_a_device_fails_or_another_is_added",),
        21: (
            "test_21_preferred_ids_are_available_and_of_the_requested_number",
            "test_equal_pods_are_listed_again_and_then_refused_by_name",
        ),
        22: ("test_22_a_refusal_takes_less_than_a_tenth_of_a_second",),
        23: (
            "test_23_a_repeated_allocate_gets_the_same_response_after_a_restart",
            "test_23_equal_requests_get_byte_identical_responses",
        ),
        24: ("test_24_known_leases_are_honoured_while_no_binder_replies",),
        26: (
            "test_every_dialect_grants_exactly_the_requested_shares_and_sets_the_container_up_for_them",
        ),
        30: ("test_init_containers_and_sidecars_are_those_of_the_pod",),
        31: ("test_plain_nvidia_pods_get_whole_cards_and_only_the_visible_devices",),
        32: (
            "test_what_would_let_a_pod_exceed_its_limits_is_denied",
            "test_32_a_pod_that_sets_a_reserved_variable_is_refused_by_its_name",
        ),
        37: ("test_each_gpu_process_is_reported_once_with_its_memory_and_recent_use",),
        40: ("test_the_lease_of_a_refused_share_is_released",),
        42: ("test_an_agent_killed_between_lease_and_allocate_resumes_from_its_checkpoint",),
        43: ("test_40_the_agent_registers_with_a_restarted_kubelet_within_a_second",),
    },
    "words": {
        1: (
            "test_each_example_of_the_guide_is_admitted_and_read_as_it_is",
            "test_a_pod_in_kais_words_shows_its_container_and_its_part_of_the_gpu",
        ),
        **dict.fromkeys((2, 14), ("test_a_request_is_that_many_mib_of_a_card",)),
        3: (
            "test_a_request_is_that_many_mib_of_a_card",
            "test_the_migration_page_names_what_kai_makes_of_memory",
        ),
        4: (
            "test_what_kai_refuses_is_refused_at_admission_and_by_the_watcher",
            "test_a_wrong_word_denies_the_pod_with_key_and_value",
            "test_a_whole_gpu_beside_a_fraction_denies_the_pod",
        ),
        5: (
            "test_several_devices_are_different_ones_of_one_node_each_with_the_part",
            "test_with_fewer_devices_than_requested_the_pod_waits_with_that_reason",
        ),
        6: (
            "test_the_first_container_gets_the_gpu_and_no_init_container_unless_it_is_named",
            "test_what_kai_refuses_is_refused_at_admission_and_by_the_watcher",
        ),
        7: (
            "test_each_example_of_the_guide_is_admitted_and_read_as_it_is",
            "test_the_annotations_by_which_a_pod_got_its_gpu_do_not_change",
        ),
        8: ("test_the_words_in_a_pod_of_another_scheduler_are_warned_of_and_have_no_effect",),
        9: (
            "test_what_kai_refuses_is_refused_at_admission_and_by_the_watcher",
            "test_pods_by_mps_wait_where_no_device_offers_it",
            "test_a_volume_with_a_pipe_of_mps_is_denied_with_the_hint_that_none_is_needed",
        ),
        10: ("test_the_container_reads_its_part_of_the_device",),
        **dict.fromkeys(
            (11, 15, 18), ("test_what_kai_refuses_is_refused_at_admission_and_by_the_watcher",)
        ),
        16: (
            "test_a_wrong_word_denies_the_pod_with_key_and_value",
            "test_the_annotations_by_which_a_pod_got_its_gpu_do_not_change",
        ),
        17: ("test_each_word_beside_an_amount_means_what_kai_documents",),
        19: (
            "test_no_node_is_taken_where_another_manager_reads_the_same_annotations",
            "test_a_node_on_which_another_manager_is_ready_says_so",
            "test_the_page_of_a_node_shows_another_manager_of_its_gpus",
        ),
        20: (
            "test_no_dialect_writes_what_kais_own_components_write_and_obey",
            "test_pods_of_all_dialects_share_one_device_and_one_ledger_counts_them",
        ),
        21: (
            "test_a_limit_above_the_request_is_warned_of_and_an_equal_one_is_not",
            "test_a_request_is_that_many_mib_of_a_card",
        ),
        35: ("test_selectors_of_gke_choose_nodes_with_as_many_replicas",),
        37: ("test_any_set_of_words_is_a_request_within_the_gpu_or_a_refusal_that_names_a_key",),
    },
    "extender": {
        1: ("test_a_pod_with_a_volume_is_handed_over_and_bound_where_its_volume_is",),
        2: ("test_required_affinity_between_pods_is_left_to_kube_scheduler",),
        3: ("test_a_hard_spread_is_left_to_kube_scheduler",),
        4: ("test_the_only_one_of_500_nodes_that_fits_is_offered_in_a_small_reply",),
        6: (
            "test_a_share_that_is_gone_is_refused_without_a_lease",
            "test_after_a_loss_of_the_share_others_of_the_node_are_tried_once",
        ),
        7: (
            "test_a_second_request_gets_the_same_reply_and_changes_nothing",
            "test_a_pod_with_a_lease_elsewhere_is_offered_that_node_only",
        ),
        8: (
            "test_the_binding_of_a_committed_lease_is_sent_again_if_its_pod_is_unbound",
            "test_a_pod_that_another_replica_filtered_is_read",
        ),
        9: ("test_requests_for_two_nodes_at_once_end_with_one_lease_and_its_binding",),
        10: ("test_a_node_whose_agent_admits_no_pod_gets_none_and_keeps_no_reservation",),
        11: ("test_a_refusal_is_published_when_its_reason_or_the_capacity_changes",),
        12: ("test_a_pod_is_annotated_once_its_quota_is_raised",),
        13: ("test_what_is_preempted_for_a_pod_of_kube_scheduler_is_offered_to_it",),
        14: ("test_a_caller_without_a_certificate_for_kube_scheduler_is_refused",),
        15: ("test_a_share_goes_to_a_pod_of_a_placer_or_of_kube_scheduler",),
        16: ("test_a_pod_waits_beside_one_that_repels_it_and_runs_once_that_has_gone",),
        17: ("test_a_pod_that_the_extender_refuses_is_explained_by_its_verdict",),
    },
    "claims": {
        18: (
            "test_a_container_gets_the_limits_of_its_claims_lease",
            "test_pods_of_a_claim_and_of_a_vendor_share_a_gpu",
        ),
        19: (
            "test_a_claim_is_leased_exactly_as_it_was_allocated",
            "test_each_difference_is_found_with_both_numbers",
        ),
        20: (
            "test_all_of_a_claim_is_refused_where_a_pod_has_the_share",
            "test_a_claim_gets_nothing_that_a_pod_has",
            "test_a_kubelet_that_could_not_read_a_claim_is_made_to_try_again",
            "test_a_pod_that_has_just_ended_does_not_count_against_the_device",
        ),
        21: ("test_two_binders_lease_a_claim_once_and_answer_it_once",),
        22: (
            "test_a_claim_that_is_leased_before_its_allocation_is_written_counts_once",
            "test_all_of_a_claim_is_refused_where_a_pod_has_the_share",
        ),
        23: (
            "test_a_pod_is_bound_once_the_binding_conditions_are_true",
            "test_an_allocation_is_leased_before_it_is_written_and_needs_no_other_answer",
            "test_an_allocation_is_stored_with_its_answer",
        ),
        24: (
            "test_an_answer_that_could_not_be_written_is_written_later",
            "test_a_claim_without_an_answer_is_published_again",
        ),
        25: ("test_a_prepared_claim_keeps_its_lease_until_it_is_not_prepared",),
        26: ("test_a_claim_waits_for_its_lease_and_is_refused_with_a_sentence_without_one",),
        27: ("test_a_claim_of_the_same_name_with_another_uid_is_refused",),
        28: (
            "test_a_slice_that_is_deleted_changed_or_lost_to_a_starting_kubelet_is_written_again",
            "test_a_claim_is_kept_over_restarts_and_released_after_its_pod",
        ),
        29: (
            "test_a_claim_is_kept_over_restarts_and_released_after_its_pod",
            "test_a_slice_that_is_deleted_changed_or_lost_to_a_starting_kubelet_is_written_again",
        ),
        30: ("test_an_agent_killed_before_its_answer_prepares_the_same_devices_again",),
        31: (
            "test_a_claim_is_leased_exactly_as_it_was_allocated",
            "test_a_claim_is_refused_if_a_container_combines_limits",
        ),
        32: ("test_all_devices_of_a_request_are_named_by_its_first_in_order_of_their_index",),
        33: (
            "test_the_agent_learns_of_further_consumers",
            "test_pods_of_a_claim_and_of_a_vendor_share_a_gpu",
        ),
        34: (
            "test_a_profile_is_a_device_whose_capacity_admits_exactly_its_size",
            "test_claims_of_a_profile_are_leased_in_free_places_until_there_is_none",
            "test_a_claim_gets_the_mig_instance_at_its_position_until_it_is_unprepared",
            "test_a_policy_with_valid_values_admits_these_amounts_only",
        ),
        35: (
            "test_an_unhealthy_device_is_tainted_with_the_effect_of_the_settings",
            "test_changes_of_health_are_reported_at_once",
        ),
        36: ("test_uses_name_claims_of_templates_extended_resources_and_vendors_resources",),
        37: (
            "test_a_stolen_token_does_only_what_the_page_says",
            "test_each_account_of_the_manifests_and_of_each_component_has_its_row",
        ),
        38: ("test_slices_whose_fields_the_api_server_drops_are_not_published",),
        39: (
            "test_a_lease_is_recovered_from_the_claims_status",
            "test_what_the_agent_has_prepared_comes_before_the_copy",
        ),
        40: (
            "test_uninstalling_removes_every_annotation_and_label_that_agents_write_to_nodes",
            "test_deleting_an_overlay_or_component_deletes_no_objects_of_users",
        ),
    },
    "enforcers": {
        1: ("test_it_is_offered_from_r615_on_and_the_reason_names_it",),
        2: (
            "test_the_accounting_is_found_by_a_limit_on_an_own_cgroup",
            "test_a_driver_that_has_misc_although_the_kernel_has_dmem_is_found",
        ),
        3: ("test_a_gap_on_the_way_to_a_container_is_reported_with_its_directory",),
        4: (
            "test_a_gpu_in_mig_mode_is_refused",
            "test_pods_of_each_kind_have_the_limits_of_their_leases_while_others_come_and_go",
        ),
        5: ("test_an_agent_that_is_limited_is_not_ready_and_reports_no_smaller_gpu",),
        7: (
            "test_a_pod_and_its_container_are_limited_before_they_run",
            "test_a_pod_whose_limit_cannot_be_set_does_not_start",
            "test_a_prepared_claim_has_the_limit_of_its_pod_or_is_not_prepared",
        ),
        8: ("test_a_pod_is_limited_to_what_its_containers_can_have_at_once",),
        9: (
            "test_without_an_agent_the_container_does_not_start",
            "test_an_agent_that_is_late_starts_nothing_within_six_seconds",
            "test_a_call_that_does_not_fit_sets_no_limit_and_is_reported_once",
        ),
        10: (
            "test_a_container_has_its_limit_on_each_gpu_before_it_starts",
            "test_a_container_does_not_start_if_one_of_its_gpus_has_another_limit",
        ),
        12: ("test_variables_of_an_image_that_would_set_other_limits_are_refused",),
        13: ("test_a_restarted_container_gets_its_limit_anew_and_its_earlier_one_is_cleared",),
        15: ("test_a_process_names_its_pod_and_container",),
        16: (
            "test_a_smaller_size_than_the_driver_can_set_waits_until_less_is_in_use",
            "test_a_smaller_size_that_the_driver_ignores_waits_although_little_is_in_use",
            "test_less_than_is_in_use_is_not_set_until_less_is_in_use",
        ),
        17: ("test_a_smaller_size_than_the_driver_can_set_waits_until_less_is_in_use",),
        18: ("test_more_that_the_driver_does_not_set_is_given_back",),
        19: ("test_a_container_with_a_late_limit_is_reported_until_it_restarts_whoever_dies",),
        **dict.fromkeys(
            (20, 53),
            ("test_the_driver_and_hami_core_have_equal_limits_and_a_difference_is_repaired",),
        ),
        21: ("test_two_hundred_containers_are_compared_within_two_calls_each",),
        22: ("test_what_somebody_raised_or_removed_is_put_back_and_reported",),
        23: (
            "test_a_gpu_with_a_limit_of_another_program_is_not_offered_and_the_limit_stays",
            "test_limits_that_other_programs_have_set_are_found_and_stay",
        ),
        24: ("test_a_thousand_containers_that_came_and_went_leave_nothing",),
        25: (
            "test_limits_that_a_reboot_of_the_driver_lost_are_set_again_by_a_new_agent",
            "test_after_a_reboot_limits_are_back_once_the_partitioner_is_and_the_lease_says_so_before",
            "test_limits_are_read_back_at_once_when_a_gpu_responds_again",
        ),
        26: ("test_running_pods_keep_what_holds_them_and_new_ones_get_what_the_driver_offers",),
        27: ("test_a_kill_at_each_step_of_a_start_leaves_no_container_without_its_limit",),
        28: (
            "test_an_older_fence_changes_nothing_also_after_a_restart",
            "test_an_older_agent_does_not_raise_what_a_newer_lease_limits",
        ),
        30: (
            "test_no_pod_with_gpus_reaches_what_sets_limits",
            "test_what_would_let_a_pod_exceed_its_limits_is_denied",
        ),
        33: (
            "test_what_would_let_a_pod_exceed_its_limits_is_denied",
            "test_variables_of_mps_that_the_agent_did_not_set_are_refused_before_the_start",
            "test_a_container_gets_its_own_daemon_and_no_library",
        ),
        37: (
            "test_user_0_is_kept_from_a_shared_server_by_webhook_and_watcher",
            "test_containers_that_are_not_user_0_may_have_shares_by_a_shared_server",
        ),
        38: (
            "test_directories_of_daemons_are_disjoint_and_short",
            "test_containers_of_a_gpu_mount_disjoint_directories_below_that_of_its_server",
            "test_the_directory_of_a_container_has_only_its_own_socket",
            "test_pods_may_not_mount_over_the_directory_of_their_daemon",
        ),
        39: ("test_no_container_starts_while_its_daemon_does_not_have_its_limits",),
        40: (
            "test_a_daemon_that_died_is_reported_and_runs_again_with_its_limits",
            "test_limits_that_were_changed_are_set_again_also_those_of_a_server",
            "test_a_process_that_is_no_client_of_its_server_is_a_violation",
            "test_a_program_in_the_namespace_of_another_container_is_a_violation",
            "test_what_was_killed_is_started_again_with_all_namespaces",
        ),
        41: (
            "test_clients_are_ended_shortly_before_the_kill_and_never_in_the_first_half_of_the_grace_period",
        ),
        42: (
            "test_a_wedged_server_closes_its_gpu_until_it_is_repaired_and_says_what_was_done",
            "test_ending_a_client_that_does_not_return_counts_as_a_wedge",
            "test_a_wedged_server_is_repaired_once_for_all_its_containers_which_are_told",
        ),
        45: (
            "test_percentages_and_pids_of_seven_digits_are_read",
            "test_rows_that_a_program_adds_by_its_command_line_are_not_believed",
        ),
        46: (
            "test_a_namespace_goes_when_its_last_client_has_and_the_server_with_the_last",
            "test_a_containers_programs_are_clients_of_its_own_daemon_and_have_its_limits",
            "test_an_older_fence_changes_nothing",
        ),
        47: ("test_all_devices_have_the_percentage_of_the_smallest_share",),
        48: ("test_it_is_off_and_says_so_unless_it_is_set",),
        51: (
            "test_of_two_placers_with_different_modes_one_wins_and_the_other_places_elsewhere",
            "test_with_one_idle_device_one_of_two_modes_is_refused",
        ),
        52: (
            "test_the_mode_changes_once_the_last_lease_has_ended",
            "test_the_mode_survives_reports_of_agents_that_start_again",
            "test_the_mode_survives_a_rebuild_of_the_ledger",
        ),
        54: ("test_explain_says_what_holds_a_share_and_as_what_it_was_read_back",),
        55: ("test_it_holds_a_pod_from_before_its_start_to_its_end_also_after_a_kill",),
        57: ("test_ten_thousand_random_messages_change_nothing",),
        58: ("test_what_sets_limits_gives_the_agent_itself_no_right_and_no_path",),
    },
}
"""Tests of an item whose names do not contain its number."""

_NEEDS_615 = "it needs a GPU with the driver R615"
_NEEDS_GPU = "it needs a GPU"

NOT_SHOWN: Mapping[str, Mapping[int, str]] = {
    "item": {},
    "koordinator": {},
    "words": {},
    "gpusharing": {},
    "hami_core": {
        34: "Leasehold does not limit it; an operator can, "
        "[by project quotas](../docs/hardware.md#disk)",
    },
    "extender": {5: "a rate, [measured](../docs/performance.md#with-the-extender)"},
    "claims": {},
    "enforcers": {
        **dict.fromkeys((6, 11, 14, 29, 31, 32, 36), _NEEDS_615),
        **dict.fromkeys((34, 35, 43, 44, 49, 50), _NEEDS_GPU),
        56: "nothing freezes or locks programs: what breaks a limit is "
        "[reported, and its pod may be evicted](../docs/devices.md#violations)",
    },
}
"""Items without a test, and why."""


def all_tests() -> dict[str, str]:
    """Return the file, from `tests`, of every test by its name; a row's name is as one of a test.

    Rows of tables have names such as "item 12 the register of two GPUs".
    """
    row = re.compile(rf'"((?:{"|".join(LISTS)}) \d+ [^":{{]+)')
    paths: dict[str, str] = {}
    tests = ROOT / "tests"
    for path in sorted((*tests.rglob("test_*.py"), *(ROOT / "simcluster").rglob("test_*.py"))):
        text = path.read_text()
        names = re.findall(r"^\s*(?:async )?def (test_\w+)", text, re.MULTILINE)
        names += ["test_" + name.strip().replace(" ", "_") for name in row.findall(text)]
        paths |= {name: os.path.relpath(path, tests) for name in names}
    return paths


def numbers_of(name: str) -> Iterator[tuple[str, int]]:
    """Yield the items in a test's name."""
    match = re.match(rf"test_({'|'.join(LISTS)})_(\d+)_(?:and_(\d+)_)?", name)
    if match:
        yield from ((match[1], int(number)) for number in match.groups()[1:] if number)


def shown_by() -> dict[tuple[str, int], list[str]]:
    shown: dict[tuple[str, int], list[str]] = {}
    for name in all_tests():
        for statement in numbers_of(name):
            shown.setdefault(statement, []).append(name)
    for checklist, elsewhere in ELSEWHERE.items():
        for number, names in elsewhere.items():
            shown.setdefault((checklist, number), []).extend(names)
    return shown


LEVELS = ("unit", "contract", "integration", "..", "e2e")


def proofs(names: Iterable[str], files: Mapping[str, str]) -> list[str]:
    """Return the tests of the lowest level that there is, and those of whole stacks."""
    levels = {name: LEVELS.index(files[name].partition("/")[0]) for name in names}
    lowest = min(levels.values(), default=0)
    return [name for name, level in levels.items() if LEVELS[level] in {LEVELS[lowest], "e2e"}]


def checklist_table(checklist: str) -> str:
    shown = shown_by()
    files = all_tests()
    rows = ["| no. | shown by |", "|---|---|"]
    for number in LISTS[checklist]:
        names = proofs(shown.get((checklist, number), ()), files)
        links = "; ".join(f"[{sentence(name)}]({files[name]})" for name in names)
        why = NOT_SHOWN[checklist].get(number, "")
        rows.append(f"| {number} | {links}{'not shown: ' if why else ''}{why} |")
    return "\n".join(rows)


def sentence(name: str) -> str:
    words = re.sub(rf"^test_(?:(?:{'|'.join(LISTS)})_)?(?:\d+_(?:and_\d+_)?)?", "", name)
    return words.replace("_", " ")


def resources_table() -> str:
    """Return a table of the resources that each dialect serves, shows and reads."""
    rows = [
        "| system | the device plugin serves | node status shows | only read |",
        "|---|---|---|---|",
    ]
    for dialect in DIALECTS.values():
        silent = dialect.resources - dialect.served - dialect.status_resources
        columns = (dialect.served, dialect.status_resources, silent)
        cells = (", ".join(f"`{name}`" for name in sorted(names)) or "-" for names in columns)
        rows.append(f"| {dialect.name} | {' | '.join(cells)} |")
    return "\n".join(rows)


def words_table() -> str:
    """Return a table of the annotations and labels that have a meaning, and of known others."""
    rows = ["| key | in a pod it is | effect |", "|---|---|---|"]
    for word in sorted(WORDS.values(), key=lambda word: word.name):
        if word.place is not Place.RESOURCE or word.note:
            effect = f"{word.effect}: {word.note}" if word.note else str(word.effect)
            rows.append(f"| `{word.name}` | {word.place} | {effect} |")
    return "\n".join(rows)


def checklists() -> str:
    """Return the checklists with the tests of each requirement."""
    return filled(CHECKLISTS, {checklist: checklist_table(checklist) for checklist in LISTS})
