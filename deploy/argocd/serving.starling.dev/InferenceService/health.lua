-- What Argo CD shows for an InferenceService. It trusts nothing that the operator wrote about an earlier generation.
local hs = {}

local function condition(kind)
  for _, c in ipairs(obj.status.conditions) do
    if c.type == kind then
      return c
    end
  end
  return nil
end

if obj.status == nil or obj.status.conditions == nil then
  hs.status = "Progressing"
  hs.message = "waiting for the operator to see the service"
  return hs
end

if obj.status.observedGeneration ~= obj.metadata.generation then
  hs.status = "Progressing"
  hs.message = "waiting for the operator to act on the newest change"
  return hs
end

local stalled = condition("Stalled")
if stalled ~= nil and stalled.status == "True" then
  hs.status = "Degraded"
  hs.message = stalled.reason .. ": " .. (stalled.message or "")
  return hs
end

local ready = condition("Ready")
if ready == nil then
  hs.status = "Progressing"
  hs.message = "waiting for the operator to judge the service"
  return hs
end

hs.message = ready.message
local reconciling = condition("Reconciling")
if ready.status == "True" then
  hs.status = "Healthy"
elseif reconciling ~= nil and reconciling.status == "False" then
  -- Neither ready, nor on the way, nor stalled: spec.suspend, or no replicas.
  hs.status = "Suspended"
else
  hs.status = "Progressing"
end
return hs
