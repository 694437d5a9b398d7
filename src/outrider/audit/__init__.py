"""Whether a service is lossless, shown on the service itself: `outrider audit`.

Five checks, a module each: `greedy` (against transformers), `identity` (same seed, same tokens),
`distribution` (goodness of fit), `divergence` (why two texts part), `quality` (what readers would notice).
`local` runs them in process, `service` against a URL, `report` shows what they found.
"""
