"""KV events on the wire: publishing them, following them, predicting hits from them."""
