"""Several models in one server: which of them are awake, and how one is woken.

    awake    an engine takes requests
    asleep   the engine's processes stay without the memory of weights and KV cache (`cpu/asleep.py`)
    cold     there is no process

`policy.py` decides, as a pure function of requests, measurements and the time that it is given: `Residency`.
`pressure.py` reads how much memory the machine has left, which other programs take, too.
`agreement.py` divides what is left among the KV caches of models that are awake, and `broker.py` has them take it.
`keeper.py` carries that out and measures, and `options.py` reads which models there are.

    request --> Service.model --> Keeper.meet   its first: the model is woken, so that prompts can be made for it
                Service.start --> Keeper.use    while it runs the model is wanted
                Replicas.submit --> until_available --> Keeper.awake   as it waits for an engine that is replaced

A model is one `EngineClient`, made with its first request and kept from then on: its tokenizer, metrics (told apart by
`model_name`) and requests outlive its engines, which sleep (`Replicas.sleep`) or end (`Replicas.rest`).
Requests that they had go on with the next engine, or the one that wakes, from the tokens that they have, as after an
engine's death, so that none is aborted. Who cannot sleep ends; `Footprint.asleep` is None then, or what was measured.

A server of one model has no keeper: its requests ask once whether there is one. Begin with `policy.py`.
"""
