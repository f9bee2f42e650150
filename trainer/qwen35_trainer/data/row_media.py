"""The images and videos of a row: their positions in the messages of the row, and the files with their pixels.

    messages: "<image> or <image>?"      ─┐
    images:   [cat.png, {bytes: …}]      ─┴─► parts: image, text, image      images: cat.png, bytes

A part may also contain its image: {type: image, image: cat.png}, {type: image_url, image_url: {url: "data:image/png;base64,…"}}.
"""

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from qwen35_trainer.data.data_errors import RowError, kind
from qwen35_trainer.data.prompt import Image, Video

_MARKS = re.compile(r"(<image>|<video>)")
_DATA = re.compile(r"data:[^,;]*;base64,", re.IGNORECASE)
_REMOTE = re.compile(r"[a-z][a-z0-9+.-]+://", re.IGNORECASE)


@dataclass
class RowMedia:
    """Assigns the images and videos in a row's columns to the placeholders in the row's messages, in order.

    folder: the folder to which paths are relative. waiting_images, waiting_videos: pictures of the columns that are not
    assigned yet. images, videos: the assigned pictures, in the order of their placeholders.
    """

    folder: Path
    waiting_images: list[Image]
    waiting_videos: list[Video]
    images: list[Image] = field(default_factory=list)
    videos: list[Video] = field(default_factory=list)

    @classmethod
    def of_row(cls, images: object, images_field: str, videos: object, videos_field: str, folder: Path) -> "RowMedia":
        """Read the images and videos in two columns of a row. None of them is assigned to a placeholder yet.

        images, videos: the values of the columns; null: the row has none. images_field, videos_field: the names of the
        columns, for errors. folder: the folder of the data file, to which paths are relative. Raises RowError for an
        entry that is not an image or video.
        """
        return cls(
            folder,
            [image_of(entry, folder, name) for entry, name in _entries(images, images_field)],
            [video_of(entry, folder, name) for entry, name in _entries(videos, videos_field)],
        )

    def __post_init__(self) -> None:
        self._marked = {
            mark for mark, waiting in (("<image>", self.waiting_images), ("<video>", self.waiting_videos)) if waiting
        }

    def split(self, text: str) -> str | list[dict[str, str]]:
        """Split a text at its <image> and <video> marks, and assign the next image or video to each mark.

        A mark stays text if the row's columns contain no pictures of that kind. A text in which no mark gets a picture
        is returned unchanged. Raises RowError if there are more marks than pictures.
        """
        pieces = [piece for piece in _MARKS.split(text) if piece]
        if not self._marked & set(pieces):
            return text
        parts: list[dict[str, str]] = []
        for piece in pieces:
            if piece in self._marked:
                parts.append({"type": self._place(piece.strip("<>"))})
            else:
                parts.append({"type": "text", "text": piece})
        return parts

    def take(self, part: Mapping[str, object]) -> str | None:
        """Assign an image or video to a part of a message, and return "image" or "video".

        If the part itself contains an image or video, that one is assigned. If the part is only a placeholder, the next
        image or video in the row's column is assigned. For any other part, such as text, nothing is assigned, and the
        result is None. Raises RowError if the image or video is invalid, and if the column has none left.
        """
        if "image" in part or "image_url" in part:
            self.images.append(image_of(part.get("image", part.get("image_url")), self.folder, "image"))
            return "image"
        if "video" in part:
            self.videos.append(video_of(part["video"], self.folder, "video"))
            return "video"
        part_type = part.get("type")
        return self._place(str(part_type)) if part_type in ("image", "video") else None

    def check_used(self) -> None:
        """Raise RowError if the row's columns have an image or video that is not assigned to a placeholder."""
        for name, waiting, placed in (
            ("image", self.waiting_images, len(self.images)),
            ("video", self.waiting_videos, len(self.videos)),
        ):
            if waiting:
                raise RowError(
                    f"{placed + len(waiting)} {name}s and {placed} placeholders: write <{name}> or a part "
                    f"{{type: {name}}} where each stands, or remove {name}s"
                )

    def _place(self, name: str) -> str:
        if name == "image" and self.waiting_images:
            self.images.append(self.waiting_images.pop(0))
        elif name == "video" and self.waiting_videos:
            self.videos.append(self.waiting_videos.pop(0))
        else:
            placed = len(self.images if name == "image" else self.videos)
            raise RowError(f"more than {placed} {name} placeholders for {placed} {name}s: add {name}s or remove marks")
        return name


def image_of(value: object, folder: Path, name: str) -> Image:
    """Return the image that a value of a row stands for.

    value: a path, a data URI, bytes, or a mapping with one of these. folder: the folder to which a path is relative.
    name: name of the value, for errors. Raises RowError for any other value.
    """
    match value:
        case bytes() if value:
            return value
        case str() if header := _DATA.match(value):
            try:
                return base64.b64decode(value[header.end() :], validate=True)
            except binascii.Error as error:
                raise RowError(f"{name}: the data URI is not base64 ({error})") from error
        case str() if _REMOTE.match(value) and not value.startswith("file://"):
            raise RowError(f"{name}: {value[:60]} is not downloaded. Save it next to the data and write its path")
        case str() if value:
            return folder / value.removeprefix("file://")
        case Mapping():
            for key in ("bytes", "path", "image", "image_url", "url"):
                if value.get(key) is not None:
                    return image_of(value[key], folder, name)
    raise RowError(f"{name}: a path, a data URI or bytes are expected, found {kind(value)}")


def video_of(value: object, folder: Path, name: str) -> Video:
    """Return the video that a value of a row stands for.

    value: a mapping such as {frames: [image, …], fps: 2}. folder: the folder to which paths of frames are relative.
    name: name of the value, for errors. Raises RowError for any other value.
    """
    frames = value.get("frames") if isinstance(value, Mapping) else None
    fps = value.get("fps") if isinstance(value, Mapping) else None
    if frames == []:
        raise RowError(f"{name}: the video has no frames. List its images in frames, or remove it")
    if not isinstance(frames, list) or isinstance(fps, bool) or not isinstance(fps, int | float):
        raise RowError(f"{name}: {{frames: [image, …], fps: frames per second}} is expected, found {kind(value)}")
    if fps <= 0:
        raise RowError(f"{name}: fps {fps} is not above 0")
    return Video(tuple(image_of(frame, folder, f"{name}.frames[{at}]") for at, frame in enumerate(frames)), float(fps))


def _entries(value: object, field_name: str) -> Sequence[tuple[object, str]]:
    if value is None:
        return ()
    if not isinstance(value, list):
        value = [value]
    return [(entry, f"{field_name}[{index}]") for index, entry in enumerate(value)]
