"""The pictures of one sequence, as references to files, which are sent to the processes that read them.

    driver: paths, or the bytes of files in the data ─┬─► replica:    read when the prompt is computed
                                                      └─► train rank: read when a micro-batch is computed

No process sends pixels. A process keeps the patches that it has used last (LRU eviction), because the samples of a prompt, and the
passes of a trainer over a batch, show the same pictures.
"""

import threading
from collections import OrderedDict
from dataclasses import dataclass

from qwen35_trainer.data.data_errors import DataError
from qwen35_trainer.data.picture_arrays import PictureArrays
from qwen35_trainer.data.picture_processor import PictureProcessor
from qwen35_trainer.data.prompt import Image, Video
from qwen35_trainer.data.template import EncodingError

MAX_KEPT_BYTES = 256 * 2**20
"""Maximum size of the patches that a process keeps in memory, in bytes. An image of 1,024 tokens takes 25 MB."""
MAX_INLINE_BYTES = 32 * 2**20
"""Maximum size in bytes of the pictures of one sequence that are in the data and not in files of their own.

The bytes are sent with each command that starts the sequence, and with the batch.
"""


@dataclass(frozen=True)
class PictureSet:
    """The pictures of one sequence, in the order of their placeholders.

    processor: reads the pictures. images, videos: paths, or the bytes of files. row: the row of the data that contains
    the pictures, for errors.
    """

    processor: PictureProcessor
    images: tuple[Image, ...]
    videos: tuple[Video, ...]
    row: str = ""

    def __len__(self) -> int:
        return len(self.images) + len(self.videos)

    @property
    def inline_bytes(self) -> int:
        """Size of the images and frames that are in the data and not in files of their own, in bytes."""
        frames = [frame for video in self.videos for frame in video.frames]
        return sum(len(image) for image in (*self.images, *frames) if isinstance(image, bytes))

    def read(self) -> PictureArrays:
        """Return the patches of all pictures, from a cache if this process has read the pictures recently.

        Raises DataError, naming the row, for a file that is missing or damaged.
        """
        return _kept_arrays.read(self)


class _KeptArrays:
    """A cache of the arrays that were used last, up to MAX_KEPT_BYTES. Several threads may read at the same time."""

    def __init__(self) -> None:
        self._arrays: OrderedDict[PictureSet, PictureArrays] = OrderedDict()  # the last one was used last
        self._bytes = 0
        self._lock = threading.Lock()

    def read(self, pictures: PictureSet) -> PictureArrays:
        with self._lock:
            if (kept := self._arrays.get(pictures)) is not None:
                self._arrays.move_to_end(pictures)
                return kept
        try:
            arrays = pictures.processor.read(pictures.images, pictures.videos)
        except EncodingError as reason:
            raise DataError([f"{pictures.row}: {reason}" if pictures.row else str(reason)]) from reason
        with self._lock:
            if pictures not in self._arrays:  # another thread may have read them meanwhile
                self._arrays[pictures] = arrays
                self._bytes += arrays.nbytes
            while self._bytes > MAX_KEPT_BYTES:
                self._bytes -= self._arrays.popitem(last=False)[1].nbytes
        return arrays


_kept_arrays = _KeptArrays()
