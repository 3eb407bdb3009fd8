"""Jobs with images: decoding them, their places in texts, what they cost, and the ranks that encode them."""

from overlord.arrange.vision.encoding import encode as encode
from overlord.arrange.vision.images import PatchGrid as PatchGrid
from overlord.arrange.vision.images import VisionTransformerCost as VisionTransformerCost
from overlord.arrange.vision.images import fuse as fuse
from overlord.arrange.vision.images import images_of as images_of
from overlord.chunks.transforms.place_images import PlaceImages as PlaceImages
from overlord.media.images import DecodeImage as DecodeImage
