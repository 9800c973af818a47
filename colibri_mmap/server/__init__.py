"""HTTP: the OpenAI and Anthropic APIs, and the models that answer them."""
