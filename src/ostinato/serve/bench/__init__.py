"""``ostinato bench``: a load generator for any server with OpenAI's API."""
