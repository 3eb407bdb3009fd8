"""Images: headers, decoding and resizing."""
