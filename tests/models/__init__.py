"""Models of transformers, timm and peft, tiny and from configurations, under every strategy: `make models`."""
