"""Words for clients while no group serves: the state of the service, and how long it may take. Routers say them."""

from starling_agent.contract.router_report import CanaryNotice, ServiceNotice

from starling_operator.plan.scaling import start_seconds_left
from starling_operator.plan.status_inputs import StatusInputs
from starling_operator.plan.verdict import Verdict


def service_notice(inputs: StatusInputs, verdict: Verdict, canary: CanaryNotice | None) -> ServiceNotice:
    service = inputs.service
    models = (list(service.spec.model.served_names) or [service.name]) if service.spec is not None else []
    if inputs.ready:
        return ServiceNotice(models=models, canary=canary)
    eta = _eta_seconds(inputs)
    return ServiceNotice(models=models, phase=verdict.reason, message=verdict.message, eta_seconds=eta, canary=canary)


def _eta_seconds(inputs: StatusInputs) -> float | None:
    """Returns the longest of what pods say of their phase and what is left of the time that the last start took."""
    progress = (pod.report.progress for group in inputs.current for pod in group.remaining_pods if pod.report is not None)
    known = [each.eta_seconds for each in progress if each is not None]
    # A whole number: the notice is news to routers only where it differs.
    return max((float(round(left)) for left in (*known, start_seconds_left(inputs.scale.status, inputs.now)) if left), default=None)
