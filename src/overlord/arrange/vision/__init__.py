"""Images and their encoder: sizes, costs, and where each is encoded."""
