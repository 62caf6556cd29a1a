"""From a model family's layers to a cache memory plan: spec (group), plan (pack, bind), base (template), families."""
