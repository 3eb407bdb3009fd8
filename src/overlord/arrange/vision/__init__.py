"""Images and their encoder: sizes, costs, and where each is encoded."""

from overlord.arrange.vision.encoding import encode
from overlord.arrange.vision.images import fuse, images_of

__all__ = ["encode", "fuse", "images_of"]
