"""Several models in one server: which of them are awake, and how one is woken.

    awake    an engine takes requests
    asleep   the engine's process stays without weights and KV cache; no engine can do that yet
    cold     there is no process

`policy.py` decides, as a pure function of requests, measurements and the time that it is given: `Residency`.
`keeper.py` carries that out and measures, and `options.py` reads which models there are.

    request --> Service.model --> Keeper.meet   its first: the model is woken, so that prompts can be made for it
                Service.start --> Keeper.use    while it runs the model is wanted
                Replicas.submit --> until_available --> Keeper.awake   as it waits for an engine that is replaced

A model is one `EngineClient`, made with its first request and kept from then on: its tokenizer, metrics (told apart by
`model_name`) and requests outlive its engines. To put a model to sleep is to let its engines rest (`Replicas.rest`).
Requests that they had go on with the next engine from the tokens that they have, as after an engine's death, so that
none is aborted. A model that is asleep will differ in `Replicas.rest` alone; `Footprint.asleep` is what it takes then.

A server of one model has no keeper: its requests ask once whether there is one. Begin with `policy.py`.
"""
