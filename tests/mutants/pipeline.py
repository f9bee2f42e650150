"""Mistakes in what may be in flight, what a batch takes, when weights travel, and what a journal adds up to."""

from functools import partial

from tests.mutants.mutant import Mutant

mutant = partial(
    Mutant,
    folders=(
        "tests/pipeline",
        "tests/rollout",
        "tests/upgrade",
        "tests/simulate",
        "tests/simulate_cli",
        "tests/runtime",
        "tests/cluster",
    ),
)

PIPELINE = (
    mutant(
        name="A group may still train one batch after the last one that the maximal lag allows.",
        file="trainer/qwen35_trainer/pipeline/window.py",
        old="return (born + self.max_version_lag + 1) * self.batches_per_version - 1",
        new="return (born + self.max_version_lag + 1) * self.batches_per_version",
        killer="tests/pipeline/test_window.py::test_the_deadline_is_the_last_batch_within_the_lag",
    ),
    mutant(
        name="Discard drops a group one batch before its deadline has passed.",
        file="trainer/qwen35_trainer/pipeline/buffer.py",
        old="while self._deadlines and self._deadlines[0] < self._batch:",
        new="while self._deadlines and self._deadlines[0] <= self._batch:",
        killer="tests/pipeline/test_buffer.py::test_discard_keeps_a_late_group_until_its_last_legal_batch",
    ),
    mutant(
        name="A sequence that continues with tokens on a replica with older weights keeps its younger birth.",
        file="trainer/qwen35_trainer/pipeline/placement.py",
        old="born = replica.version if born_before is None else min(born_before, replica.version)",
        new="born = replica.version if born_before is None else born_before",
        killer="tests/pipeline/test_coordinator.py::test_a_sequence_that_continues_with_older_weights_is_as_old_as_they_are",
    ),
    mutant(
        name="A version counts as published while one replica has not loaded it.",
        file="trainer/qwen35_trainer/pipeline/publication_state.py",
        old="if self._in_transfer is not None and self._replicas_behind == 0:",
        new="if self._in_transfer is not None and self._replicas_behind <= 1:",
        killer="tests/pipeline/test_coordinator.py"
        "::test_a_transfer_overlaps_the_next_batch_and_the_window_opens_when_all_have_the_version",
    ),
    mutant(
        name="The next batch trains over weights that still wait to be copied.",
        file="trainer/qwen35_trainer/pipeline/publication_state.py",
        old="return self._pending is not None or self._copying is not None",
        new="return self._copying is not None",
        killer="tests/pipeline/test_coordinator.py::test_weights_are_copied_once_ahead_and_the_batch_after_that_waits",
    ),
    mutant(
        name="The last version of a run that ends within a version is never published.",
        file="trainer/qwen35_trainer/pipeline/coordinator.py",
        old="if batches_after == 0 or self._trained == self.settings.batches:",
        new="if batches_after == 0:",
        killer="tests/pipeline/test_coordinator.py"
        "::test_a_whole_run_trains_every_prompt_once_publishes_every_version_and_saves_at_the_end",
    ),
    mutant(
        name="A run that is stopped ends without saving the batches since its last checkpoint.",
        file="trainer/qwen35_trainer/pipeline/coordinator.py",
        old="save = self._checkpoint_requested or (complete and self._saved < self._trained)",
        new="save = self._checkpoint_requested",
        killer="tests/pipeline/test_coordinator.py::test_a_stop_saves_what_has_trained_and_ends",
    ),
    mutant(
        name="After a resume the prompts of filtered and failed groups are dispatched again.",
        file="trainer/qwen35_trainer/pipeline/replay.py",
        old="if record.reason is LeaveReason.DISCARDED:",
        new="if record.reason is not LeaveReason.TRAINED:",
        killer="tests/pipeline/test_journal.py::test_only_a_discarded_prompt_comes_again",
    ),
    mutant(
        name="A resume takes the batch that the weights have not trained for trained.",
        file="trainer/qwen35_trainer/pipeline/journal.py",
        old="case TrainGroups() if record.batch == batch:",
        new="case TrainGroups() if record.batch > batch:",
        killer="tests/pipeline/test_journal.py::test_weights_continue_before_the_batch_that_they_have_not_trained",
    ),
    mutant(
        name="Adaptive dispatch takes a group for late that finishes during its last legal batch.",
        file="trainer/qwen35_trainer/pipeline/adaptive.py",
        old="batches_allowed = max(deadline, batch) - dispatched_at + 1",
        new="batches_allowed = max(deadline, batch) - dispatched_at",
        killer="tests/pipeline/test_adaptive.py::test_a_group_that_finishes_during_its_last_legal_batch_is_not_late",
    ),
)
