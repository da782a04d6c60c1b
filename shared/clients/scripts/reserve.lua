-- Reserve for a group of pods. Arguments: now, expires_at, rows of {pod, body, tag, resources,
-- candidates of {node, holds, places, shares}}. Answers per pod: {candidate (from 1), version,
-- grants}, {0, lease} for a pod that has one, {-1, reason, nodes, devices} if nothing fits.
local now, expires_at, rows = A[1], A[2], A[3]

local pods, first_nodes, first_devices = {}, {}, {}
for i, row in ipairs(rows) do
  local candidate = row[5][1]
  pods[i] = row[1]
  if candidate then
    first_nodes[#first_nodes + 1] = candidate[1]
    for h = 1, #candidate[2], HOLD do first_devices[#first_devices + 1] = candidate[2][h] end
  end
end
fetch('lease', pods)
fetch('node', first_nodes)
fetch('device', first_devices)

local function grants_for(holds, places)
  local grants, slots = {}, {}
  for h = 1, #holds, HOLD do
    local device, given = devices[holds[h]], {}
    for s = 1, holds[h + 4] do
      given[s] = lowest_slot(device[D_TAKEN])
      device[D_TAKEN] = with_slot(device[D_TAKEN], given[s], '1')
    end
    slots[#slots + 1] = given
  end
  for p = 1, #places, 2 do
    local device = devices[holds[(places[p] - 1) * HOLD + 1]]
    device[D_FENCE] = device[D_FENCE] + 1
    grants[p] = places[p + 1] > 0 and slots[places[p]][places[p + 1]] or -1
    grants[p + 1] = device[D_FENCE]
  end
  return grants
end

local function full(row, reasons)
  local told_nodes, told_devices = {}, {}
  for _, candidate in ipairs(row[5]) do
    local node = nodes[candidate[1]]
    if node then
      told_nodes[#told_nodes + 1] = {candidate[1], node[N_VERSION], node[N_USED]}
    end
    for h = 1, #candidate[2], HOLD do
      local device = device_of(candidate[2][h])
      if device then told_devices[#told_devices + 1] = {candidate[2][h], device} end
    end
  end
  return {-1, table.concat(reasons, '; '), told_nodes, told_devices}
end

local out, reserved = {}, {}
for i, row in ipairs(rows) do
  local pod = row[1]
  if leases[pod] then
    out[i] = {0, leases[pod]}
  else
    local reasons
    for c, candidate in ipairs(row[5]) do
      local why = fits(candidate[1], row[4], candidate[2], row[3])
      if not why then
        local grants = grants_for(candidate[2], candidate[3])
        local version = next_version()
        local lease = {'reserved', version, version, candidate[1], now, expires_at, row[3],
          row[4], candidate[2], candidate[3], grants, pod, row[2], candidate[4]}
        leases[pod] = lease
        count(lease, 1)
        index_lease(pod, lease)
        reserved[#reserved + 1] = pod
        out[i] = {c, version, grants}
        break
      end
      reasons = reasons or {}
      reasons[c] = candidate[1] .. ': ' .. why
    end
    if not out[i] then out[i] = full(row, reasons or {'no candidate'}) end
  end
end
if #reserved > 0 then
  leave_waiting(reserved)
  flush('reserved')
end
return pack(out)
