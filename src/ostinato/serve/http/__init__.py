"""The HTTP server: OpenAI's API over ``engine.async_llm``."""
