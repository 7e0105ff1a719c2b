"""Pure functions: Arrow tables to Bokeh plots. Importing a chart imports Bokeh, so import it late."""
