"""Reasons of failed attempts: the words that the trainer, the operator, status, events and `failurePolicy` rules share.

Each exception that can end a run has a class attribute `failure` with its reason. Modules of all layers define such
exceptions, so this module imports nothing of the project. The operator's built-in rules and the table in
docs/failure-modes.md are derived from this module.
"""

from __future__ import annotations

from enum import StrEnum


class FailureReason(StrEnum):
    """The reason why an attempt failed.

    The enum's value is the word in the trainer's report and in `status.attempts[].reason`.
    """

    meaning: str
    """What happened, as a sentence."""
    retryable: bool
    """Whether a further attempt can succeed although nobody changes anything."""
    rationale: str
    """Why a further attempt can or cannot succeed, as a sentence."""

    def __new__(cls, word: str, meaning: str, retryable: bool, rationale: str) -> FailureReason:
        reason = str.__new__(cls, word)
        reason._value_ = word
        reason.meaning, reason.retryable, reason.rationale = meaning, retryable, rationale
        return reason

    MANIFEST_ERROR = (
        "ManifestError",
        "The manifest names something that does not exist, or needs something that this release or this machine does not support.",
        False,
        "The next attempt reads the same manifest.",
    )
    DATA_ERROR = (
        "DataError",
        "The data cannot be used as the manifest configures them.",
        False,
        "The next attempt reads the same data.",
    )
    FOLDER_REFUSED = (
        "FolderRefused",
        "The output folder or the folder of the checkpoints belongs to another run, holds a run with other fixed fields, or "
        "cannot be written.",
        False,
        "A person has to choose another folder or to repair this one.",
    )
    MODEL_UNUSABLE = (
        "ModelUnusable",
        "The files of the model to start from are incomplete or do not fit together.",
        False,
        "The next attempt loads the same files.",
    )
    CHECKPOINT_UNUSABLE = (
        "CheckpointUnusable",
        "The checkpoint to resume from is missing, is damaged, or does not fit the model.",
        False,
        "The next attempt would choose the same checkpoint.",
    )
    REWARD_SETUP_ERROR = (
        "RewardSetupError",
        "A reward cannot be built: its function cannot be imported, or its configuration does not fit the data.",
        False,
        "The next attempt builds the same rewards.",
    )
    REWARD_FAILED = (
        "RewardFailed",
        "A reward with `onError: Fail` could not score a response, or every reward failed for all responses of the first batch.",
        False,
        "`onError: Fail` means that the training must end; rewards that always fail would leave nothing to learn from.",
    )
    PACKING_INEXACT = (
        "PackingInexact",
        "Packed sequences have other scores or gradients than the same sequences apart.",
        False,
        "The next attempt computes with the same kernels, and checks the same tokens.",
    )
    LOG_PROBS_DIFFER = (
        "LogProbsDiffer",
        "No replica computes the log-probabilities that the trainer computes with the same weights.",
        False,
        "The next attempt computes with the same kernels, and several replicas, or the only one twice, had the same result.",
    )
    NOTHING_TO_TRAIN = (
        "NothingToTrain",
        "Too many groups in a row left the pipeline untrained: filtered, discarded or failed.",
        False,
        "The same prompts, rewards and filters would leave nothing to train again.",
    )
    NOT_FINITE_IN_SFT = (
        "NotFiniteInSFT",
        "In SFT, gradients were infinite or not a number for several updates in a row.",
        False,
        "SFT trains on the same examples in the same order again.",
    )
    BOUND_BROKEN = (
        "BoundBroken",
        "A token with a lag above `async.maxVersionLag` was about to be trained.",
        False,
        "This is a bug in the scheduling core, and load does not cause it.",
    )

    NOT_FINITE = (
        "NotFinite",
        "Gradients were infinite or not a number for several updates in a row, or log-probabilities of generated tokens on all "
        "replicas.",
        True,
        "The next attempt samples other responses, from the weights of the last checkpoint.",
    )
    STORAGE_FAILED = (
        "StorageFailed",
        "A checkpoint, a publication or the journal could not be written, or the storage could not be read.",
        True,
        "A disk that is full or away is often repaired while the operator waits before the next attempt.",
    )
    JOURNAL_DAMAGED = (
        "JournalDamaged",
        "The journal was damaged on disk while a run used it.",
        True,
        "The next attempt continues from the position in the checkpoint, and begins another journal.",
    )
    OUT_OF_MEMORY = (
        "OutOfMemory",
        "A machine or an accelerator ran out of memory.",
        True,
        "Memory depends on the lengths of the responses. Before the first update of a training it does not: a built-in rule then "
        "fails the training.",
    )
    WORKER_LOST = (
        "WorkerLost",
        "The process of a train worker ended, or too few rollout replicas worked for too long.",
        True,
        "The next attempt starts other processes, after a lost node on other nodes.",
    )
    WEIGHTS_DAMAGED = (
        "WeightsDamaged",
        "A replica received weights whose checksums differ from those that were published.",
        True,
        "Memory or the network damaged one copy, and the next attempt makes another.",
    )
    STALLED = (
        "Stalled",
        "A wait reached its deadline, or no new version was published for `failurePolicy.stallFactor` × the median interval.",
        True,
        "What hangs is mostly a process, a device or a connection, and the next attempt has others.",
    )
    SUPERSEDED = (
        "Superseded",
        "Another attempt has taken over the folder of the run or of its checkpoints, or saved there while this one started. This "
        "attempt wrote nothing after that.",
        True,
        "One attempt owns the folders, and the next one takes them over. It does not count against `maxRestarts`.",
    )
    DRIVER_LOST = ("DriverLost", "The driver's process ended.", True, "The next attempt starts another driver.")
    INTERRUPTED = (
        "Interrupted",
        "A signal ended the attempt, although nobody had asked the training to stop.",
        True,
        "The next attempt continues from the last checkpoint.",
    )
    NO_FINAL_STATE = (
        "NoFinalState",
        "The RayJob, or the command in it, ended, and the trainer reported no outcome.",
        True,
        "The cause is unknown, and it is often the loss of a process or a pod.",
    )
    HEAD_LOST = (
        "HeadLost",
        "Another head pod took the place of the one from which the trainer reported.",
        True,
        "The next attempt has a head of its own.",
    )
    JOB_DELETED = (
        "JobDeleted",
        "The attempt's RayJob was deleted, and not by the operator.",
        True,
        "The training is still wanted, so the operator creates the next RayJob.",
    )
    UNEXPECTED_ERROR = (
        "UnexpectedError",
        "The trainer raised an exception that has no reason of its own; the message begins with its class.",
        True,
        "It may come from the machine, a library, or functions of your own.",
    )


def reason_of(error: BaseException) -> FailureReason:
    """Return the reason of an exception that ended a run: the value of its attribute `failure`.

    Returns OUT_OF_MEMORY for an error about too little memory, and UNEXPECTED_ERROR for any other exception without a
    reason. An ExceptionGroup has the reason of its first exception.
    """
    if isinstance(error, BaseExceptionGroup):
        return reason_of(error.exceptions[0])
    reason = getattr(error, "failure", None)
    if isinstance(reason, FailureReason):
        return reason
    # By name, because torch.OutOfMemoryError cannot be imported here.
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return FailureReason.OUT_OF_MEMORY
    return FailureReason.UNEXPECTED_ERROR


def table() -> str:
    """Return a Markdown table of all reasons, which is the table of docs/failure-modes.md."""
    rows = [
        f"| `{reason}` | {'yes' if reason.retryable else 'no'} | {reason.meaning} | {reason.rationale} |"
        for reason in FailureReason
    ]
    return "\n".join(["| Reason | Retried | Meaning | Why |", "|---|---|---|---|", *rows])
