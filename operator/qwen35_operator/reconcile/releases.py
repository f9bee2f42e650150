"""Keeps all attempts of a training pinned to one trainer image and one version of Ray when the operator is upgraded.

    first attempt: the operator's release ─► status.release ─► every restart ─┬─► suspended and resumed, or
                        ▲                                                     └─► annotation UPDATE has a new value
                        └───────────────────────────────────────────────────────────────────┘

An automatic restart must not continue a checkpoint with another trainer. The image is pinned by its digest as soon as
the trainer has reported. The status takes the release from the RayJob of the latest attempt. The release is therefore
also known after a crash of the operator, and for attempts that an earlier operator has started.
"""

from dataclasses import replace
from typing import Final

from qwen35_operator.api.v1alpha1 import ReleaseStatus
from qwen35_operator.desired import trainer_release
from qwen35_operator.desired.trainer_release import TrainerRelease
from qwen35_operator.operator_settings import OperatorSettings
from qwen35_operator.reconcile import attempts
from qwen35_operator.reconcile.observed import Observed
from qwen35_operator.reconcile.situation import Situation
from qwen35_operator.status.conditions import ConditionType, true_condition

FINAL_CONDITIONS: Final[tuple[ConditionType, ...]] = ("Succeeded", "Failed")


def with_release(observed: Observed, settings: OperatorSettings) -> Observed:
    """Return the observation, with the latest attempt's release and the available release in its status.

    The status of a training that has ended stays as it is. Otherwise an upgrade of the operator would write to every
    ended training.
    """
    release = _release(observed)
    if release is None or any(true_condition(observed.status, final) for final in FINAL_CONDITIONS):
        return observed
    if observed.training is not None:
        offered = trainer_release.present(observed.training, settings)
        parts = [f"image {offered.reference}"] if offered.reference != release.reference else []
        parts += [f"Ray {offered.ray_version}"] if offered.ray_version != release.rayVersion else []
        release = release.model_copy(update={"available": ", ".join(parts) or None})
    return replace(observed, status=observed.status.model_copy(update={"release": release}))


def for_next_attempt(situation: Situation) -> TrainerRelease:
    """Return the release for the next attempt: after a failure the one in the status, otherwise the operator's present one.

    After a failure, the operator's release is used in two cases: if the user has requested another release (annotation
    UPDATE, or another spec.pods.image), and if no trainer of this training has ever reported, because the image in the
    status may be broken.
    """
    recorded, request = situation.status.release, situation.observed.update_request
    last = attempts.last_attempt(situation.status.attempts)
    if recorded is not None and last is not None and last.outcome == "Failed" and situation.status.progress is not None:
        requested = request not in ("", recorded.request or "")
        named = situation.spec.pods.image not in (None, recorded.reference)
        if not requested and not named:
            return TrainerRelease(recorded.reference, recorded.image, recorded.rayVersion, recorded.request or "")
    return replace(trainer_release.present(situation.training, situation.settings), request=request)


def _release(observed: Observed) -> ReleaseStatus | None:
    """Return the release of the latest attempt, or None if there has been no attempt."""
    recorded, attempt = observed.status.release, attempts.last_attempt(observed.status.attempts)
    job = None if attempt is None else attempts.job_of(observed, attempt.number)
    if attempt is None or job is None or not job.image:
        return recorded
    if recorded is None or recorded.attempt != job.attempt:
        recorded = ReleaseStatus(
            attempt=job.attempt,
            reference=job.image_reference or job.image,
            image=job.image,
            rayVersion=job.ray_version,
            request=job.update_request or None,
        )
    pods = attempts.pods_of(observed, attempt.number)
    image_ids = {pod.image_id for pod in pods if pod.image_id}
    # Once the trainer reports, all pods run. Pods of several architectures may report different digests.
    if len(image_ids) == 1 and attempts.present_report_of(observed, attempt) is not None:
        image = trainer_release.by_digest(recorded.image, image_ids.pop())
        return recorded.model_copy(update={"image": image})
    return recorded
