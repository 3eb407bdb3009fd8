"""Images and their encoder: count the tokens of images, and choose the rank that encodes each image.

A strategy calls these functions: `images_of` lists the images of a step, `fuse` adds their tokens to the lengths of samples,
`encode` spreads their encoding over ranks. `strategies.multimodal` is the ready-made strategy.
"""
