"""The explorer: a local web app in which one sees a code decide.

app.py        the Dash app, put together          security.py   token, headers, hosts, sizes: who may ask what
server.py     the web server, on this machine     donors.py     whose code a patch puts in, and what it can show
catalogue.py  the models that were given, opened  state.py      the address bar: read, checked, written
view.py       how any task's instances are shown  model.py      an opened model
puzzle_view.py, function_view.py  views of SRAVEN and fuzzy logic; their questions: puzzles.py, functions.py
sentences.py  the lens
inside.py     codes, networks, patches            atlas.py      codes of many instances: map and neighbours
panels.py     puzzles as SVG                      figures.py    plots
layout.py     the page's frame                    callbacks.py  what happens when the address changes
stage.py      its left side: which question       slots.py      its right side: a model's column
parts.py      pieces of both                      assets/       style sheet, links without reloading
"""
