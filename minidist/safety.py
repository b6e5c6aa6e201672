def install(wire):
    pass
