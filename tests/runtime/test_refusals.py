"""Whether a refused sequence is the fault of its replica or of its prompt."""

from qwen35_trainer.runtime.refusals import MAX_FAULTS, Refusals

FIRST, SECOND = 1, 2


def refuse(refusals: Refusals, *names: tuple[int, int], replica: int = FIRST) -> list[bool]:
    return [refusals.refused(name, replica, f"cannot read {name}") for name in names]


def test_a_refused_sequence_is_tried_once_more() -> None:
    refusals = Refusals()
    assert refuse(refusals, (0, 0)) == [True]
    assert refuse(refusals, (0, 0), replica=SECOND) == [False]
    refusals.ended((0, 0))
    assert refuse(refusals, (0, 0)) == [True], "another sequence with this name"


def test_a_replica_is_trusted_again_once_each_of_its_refused_sequences_has_a_second_result() -> None:
    refusals = Refusals()
    refuse(refusals, (0, 0), (1, 0), (2, 0), (3, 0))
    refusals.generated((0, 0), SECOND)
    refuse(refusals, (1, 0), replica=SECOND)
    refusals.ended((2, 0))
    assert refusals.take_trusted() == []
    refusals.generated((3, 0), FIRST)
    assert refusals.take_trusted() == [FIRST]
    assert refusals.take_trusted() == []


def test_a_replica_fails_when_it_refuses_what_others_generate_each_time_that_it_is_trusted() -> None:
    refusals = Refusals()
    for group in range(MAX_FAULTS):
        assert refusals.failure(FIRST) is None
        refuse(refusals, (group, 0), (group, 1))
        refusals.generated((group, 0), SECOND)
        refusals.generated((group, 0), SECOND)  # its end, after its first token
        refusals.generated((group, 1), SECOND)
        assert refusals.take_trusted() == [FIRST]
    failure = refusals.failure(FIRST)
    assert failure is not None
    assert "3 times in a row" in failure
    assert "cannot read (2, 1)" in failure
    assert refusals.failure(SECOND) is None
    refusals.lost(FIRST)
    assert refusals.failure(FIRST) is None


def test_what_a_replica_refuses_at_one_moment_is_one_fault_however_many_sequences_it_is() -> None:
    refusals = Refusals()
    names = [(group, index) for group in range(5) for index in range(8)]
    refuse(refusals, *names)
    for name in names:
        refusals.generated(name, SECOND)
    assert refusals.take_trusted() == [FIRST]
    assert refusals.failure(FIRST) is None


def test_a_replica_that_generates_between_its_refusals_does_not_fail() -> None:
    refusals = Refusals()
    for group in range(3 * MAX_FAULTS):
        refuse(refusals, (group, 0))
        refusals.generated((group, 0), SECOND)
        refusals.take_trusted()
        refusals.generated((100 + group, 0), FIRST)
        assert refusals.failure(FIRST) is None


def test_prompts_that_no_replica_can_generate_are_the_fault_of_none() -> None:
    refusals = Refusals()
    for group in range(3 * MAX_FAULTS):
        refuse(refusals, (group, 0))
        refuse(refusals, (group, 0), replica=SECOND)
        refusals.ended((group, 0))
        assert refusals.take_trusted() == [FIRST]
    assert refusals.failure(FIRST) is None
    assert refusals.failure(SECOND) is None
