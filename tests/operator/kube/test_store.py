"""However late, often or disordered events arrive, the store ends with the present objects."""

from dataclasses import dataclass, replace
from datetime import UTC, datetime

from hypothesis import given, settings
from hypothesis import strategies as st

from qwen35_operator.kube.kinds import CONFIG_MAP
from qwen35_operator.kube.object_parsing import record
from qwen35_operator.kube.object_records import OwnWrite
from qwen35_operator.kube.store import Store, TrainingKey
from tests.operator.kube import raw_objects
from tests.profiles import examples

KEY = ("team", "demo")


def one(name="a", *, version, uid="u1", training="demo", namespace="team"):
    metadata = raw_objects.metadata(name, version=version, uid=uid, training=training)
    return record(CONFIG_MAP, {"metadata": {**metadata, "namespace": namespace}})


def versions(store: Store, key=KEY) -> dict[str, str]:
    return {record.name: record.version for record in store.of(key)}


def test_an_older_version_changes_nothing() -> None:
    store = Store()
    assert store.put("demo", one(version=10))
    assert not store.put("demo", one(version=9))
    assert not store.put("demo", one(version=10))
    assert versions(store) == {"a": "10"}


def test_versions_are_numbers_not_text() -> None:
    store = Store()
    store.put("demo", one(version=9))
    assert store.put("demo", one(version=10))


def test_a_new_object_takes_the_place_of_a_deleted_one_whose_end_was_not_seen() -> None:
    store = Store()
    store.put("demo", one(version=3))
    assert store.put("demo", one(version=7, uid="u2"))
    assert not store.put("demo", one(version=5))
    assert not store.remove("team", "a", "u1", "6")
    assert [record.uid for record in store.of(KEY)] == ["u2"]


def test_a_deletion_counts_for_the_object_it_means() -> None:
    store = Store()
    store.put("demo", one(version=3))
    assert store.remove("team", "a", "u1", "4")
    assert not store.remove("team", "a", "u1", "4")
    assert versions(store) == {}


def own(record, version: int):
    """The same object in the answer to a write of the operator."""
    return replace(record, own_write=OwnWrite(str(version), datetime(2026, 1, 1, tzinfo=UTC)))


def test_the_operators_write_is_recorded_also_if_the_watch_was_faster_and_until_the_object_is_another() -> None:
    store = Store()
    store.put("demo", one(version=7))
    assert not store.put_own("demo", own(one(version=7), 7))
    store.put("demo", one(version=9))
    assert [(record.version, record.own_write.version) for record in store.of(KEY)] == [("9", "7")]
    store.put_own("demo", own(one(version=11), 11))
    assert [record.own_write.version for record in store.of(KEY)] == ["11"]
    store.put("demo", one(version=12, uid="u2"))
    assert [record.own_write for record in store.of(KEY)] == [None]


def test_a_late_answer_does_not_bring_back_what_was_deleted_since() -> None:
    store = Store()
    store.put("demo", one(version=3))
    store.remove("team", "a", "u1", "5")
    assert not store.put_own("demo", one(version=4))
    assert versions(store) == {}


def test_a_late_answer_does_not_bring_back_what_a_list_no_longer_had() -> None:
    store = Store()
    store.replace(None, [], "5")
    assert not store.put_own("demo", one(version=4))
    assert store.put_own("demo", one(version=6))


def test_how_far_one_namespace_has_been_seen_says_nothing_about_another() -> None:
    store = Store()
    store.replace("elsewhere", [], "50")
    store.remove("elsewhere", "a", "u1", "60")
    assert store.put_own("demo", one(version=4))


def test_an_answer_that_is_early_is_not_undone_by_earlier_events() -> None:
    store = Store()
    assert store.put_own("demo", one(version=9))
    assert not store.put("demo", one(version=7))
    store.replace(None, [], "8")
    assert versions(store) == {"a": "9"}


def test_an_object_is_found_under_the_training_that_its_label_names_last_and_both_are_reported() -> None:
    store = Store()
    assert store.put("demo", one(version=3)) == {KEY}
    assert store.put("other", one(version=4, training="other")) == {KEY, ("team", "other")}
    assert versions(store) == {}
    assert versions(store, ("team", "other")) == {"a": "4"}


def test_a_list_drops_what_it_does_not_name_and_keeps_what_is_newer() -> None:
    store = Store()
    store.put("demo", one("gone", version=3))
    store.put("demo", one("stays", version=4))
    store.put("later", one("created since", version=12, training="later"))
    changed = store.replace(
        None, [("demo", one("stays", version=4)), ("new", one("new", version=8, training="new"))], "10"
    )
    assert changed == {("team", "demo"), ("team", "new")}
    assert versions(store) == {"stays": "4"}
    assert versions(store, ("team", "later")) == {"created since": "12"}


def test_a_list_notifies_both_trainings_of_an_object_that_moved_between_them() -> None:
    store = Store()
    store.put("demo", one(version=3))
    assert store.replace(None, [("other", one(version=4, training="other"))], "10") == {KEY, ("team", "other")}


def test_the_end_of_an_object_is_reported_to_the_training_that_had_it() -> None:
    store = Store()
    store.put("demo", one(version=3))
    assert store.remove("team", "a", "u1", "9") == {KEY}
    assert store.remove("team", "a", "u1", "9") == set()


def test_a_list_without_changes_notifies_nobody() -> None:
    store = Store()
    store.put("demo", one(version=3))
    assert store.replace(None, [("demo", one(version=3))], "10") == set()


def test_a_list_of_one_namespace_leaves_the_others_alone() -> None:
    store = Store()
    store.put("demo", one(version=3))
    store.put("demo", one(version=3, namespace="elsewhere"))
    assert store.replace("team", [], "10") == {KEY}
    assert versions(store, ("elsewhere", "demo")) == {"a": "3"}


@dataclass(frozen=True)
class Event:
    version: int
    name: str
    uid: str
    training: str
    deleted: bool

    def reach(self, store: Store) -> None:
        before = held(store)
        if self.deleted:
            notified = store.remove("team", self.name, self.uid, str(self.version))
        else:
            notified = store.put(self.training, self.record)
        assert_notified(notified, before, held(store))

    @property
    def record(self):
        return one(self.name, version=self.version, uid=self.uid, training=self.training)


@st.composite
def logs(draw) -> list[Event]:
    """What happened, in order; the n-th event has version n."""
    log: list[Event] = []
    alive: dict[str, str] = {}
    for version in range(1, draw(st.integers(1, 14)) + 1):
        name, training = draw(st.sampled_from("abc")), draw(st.sampled_from(["demo", "other"]))
        deleted = name in alive and draw(st.booleans())
        uid = alive.setdefault(name, f"u{version}")
        log.append(Event(version, name, uid, training, deleted))
        if deleted:
            del alive[name]
    return log


def state(log: list[Event]) -> dict[str, tuple[str, int]]:
    latest = {event.name: event for event in log}
    return {name: (event.training, event.version) for name, event in latest.items() if not event.deleted}


def held(store: Store) -> dict[str, tuple[str, int]]:
    return {
        record.name: (training, int(record.version))
        for training in ("demo", "other")
        for record in store.of(("team", training))
    }


def assert_notified(
    notified: set[TrainingKey], before: dict[str, tuple[str, int]], after: dict[str, tuple[str, int]]
) -> None:
    """Those trainings and no others whose objects are not what they were."""
    moved = {name for name in before | after if before.get(name) != after.get(name)}
    assert notified == {("team", where[name][0]) for name in moved for where in (before, after) if name in where}


@settings(max_examples=examples(200))
@given(log=logs(), data=st.data())
def test_replays_late_answers_and_lists_end_at_what_is(log, data) -> None:
    """A watch that goes back, answers to our own writes early and late, new lists: whatever the order."""
    store, place, floor = Store(), 0, 0
    moves = st.sampled_from(["on", "back", "list", "answer"])
    for move in data.draw(st.lists(moves, max_size=12)):
        match move:
            case "on":
                ahead = data.draw(st.integers(place, len(log)))
                for event in log[place:ahead]:
                    event.reach(store)
                place = ahead
            case "back":
                place = data.draw(st.integers(floor, place)) if place else 0
            case "list":
                place = floor = data.draw(st.integers(place, len(log)))
                listed = [
                    event for event in log[:place] if state(log[:place]).get(event.name, ("", 0))[1] == event.version
                ]
                before = held(store)
                notified = store.replace(None, [(event.training, event.record) for event in listed], str(place))
                assert_notified(notified, before, held(store))
            case "answer":
                written = data.draw(st.sampled_from(log))
                if not written.deleted:
                    store.put_own(written.training, written.record)
    for event in log[place:]:
        event.reach(store)
    assert held(store) == state(log)
