"""For contributors: what the other packages of fzero use."""

# Modules
from fzero.report import report_writer as report_writer

# Which attempts of a run are counted together, and what differs between runs
from fzero.report.compare import planned_for as planned_for

# Pictures over the tokens and steps of a run, and of several runs
from fzero.report.curves import write_pictures as write_pictures

# The first screen of the page
from fzero.report.first_screen import opening as opening

# The sections of a report
from fzero.report.sections import chapters as chapters

# The values of a report
from fzero.report.values import ReportTable as ReportTable
from fzero.report.values import command_of as command_of
