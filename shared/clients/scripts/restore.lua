-- Write leases that the cluster implies, with their slots and fences, unless they would over-commit
-- a device. Arguments: token ('' while ready), now, seconds the rebuild's lock is prolonged by, rows
-- of leases. Answers per lease: '' or why it was not written.
local token, now, lock_s, rows = A[1], A[2], A[3], A[4]
if meta[1] ~= '1' then
  if call('HGET', P .. 'meta', 'epoch') ~= token then return redis.error_reply('STALETOKEN') end
  call('HSET', P .. 'meta', 'until', now + lock_s)
end

local RANK = {reserved = 1, bound = 2, active = 3}

local function device_for(lease, uuid)
  local device = device_of(uuid)
  if not device then
    device = {lease[L_NODE], 0, 0, 0, 1, 0, 0, 0, floor, '', ''}
    devices[uuid] = device
    local uuids = uuids_on(lease[L_NODE])
    uuids[#uuids + 1] = uuid
    call('HSET', P .. 'facts:' .. lease[L_NODE], 'uuids', pack(uuids))
  end
  return device
end

local function clash(lease, takes)
  local grants, last = lease[L_GRANTS], takes[2]
  for h = TAKES, last, HOLD do
    local device = device_of(takes[h])
    if device then
      local told = device[D_MEMORY] > 0
      if told and device[D_USED] + takes[h + 1] > device[D_MEMORY] then return 'memory' end
      if device[D_CORES] + takes[h + 2] > 100 then return 'cores' end
      if takes[h + 5] == 1 and device[D_SHARES] > 0 then return 'alone' end
      if device[D_CORES] >= 100 then return 'held-alone' end
      if lease[L_TAG] ~= '' and has_tag(device, lease[L_TAG]) then return 'tag' end
    end
  end
  for p = last + 1, #takes, 2 do
    local device = device_of(takes[TAKES + (takes[p] - 1) * HOLD])
    local slot = grants[p - last]
    if device and slot >= 0 and string.sub(device[D_TAKEN], slot + 1, slot + 1) == '1' then
      return 'slot ' .. slot
    end
  end
end

local function write(lease, takes)
  local grants, last = lease[L_GRANTS], takes[2]
  if not node_of(lease[L_NODE]) then
    nodes[lease[L_NODE]] = {0, 0, ''}
    call('SADD', P .. 'nodes', lease[L_NODE])
  end
  for h = TAKES, last, HOLD do device_for(lease, takes[h]) end
  for p = last + 1, #takes, 2 do
    local device = devices[takes[TAKES + (takes[p] - 1) * HOLD]]
    local slot, fence = grants[p - last], grants[p - last + 1]
    if slot >= 0 then device[D_TAKEN] = with_slot(device[D_TAKEN], slot, '1') end
    device[D_FENCE] = math.max(device[D_FENCE], fence)
  end
  seq = math.max(seq, lease[L_VERSION])
  leases[lease[L_POD]] = lease
  count(takes, parse(lease[L_RESOURCES]), lease[L_TAG], 1)
  index_lease(lease[L_POD], lease[L_NODE], lease[L_EXPIRES])
end

local function meet(known, lease)
  if known[L_NODE] ~= lease[L_NODE] or known[L_GRANTS][2] ~= lease[L_GRANTS][2] then
    return 'the pod has another lease'
  end
  if RANK[lease[L_STATE]] > RANK[known[L_STATE]] then
    known[L_STATE], known[L_EXPIRES] = lease[L_STATE], 0
    known[L_VERSION] = math.max(next_version(), lease[L_VERSION])
    seq = known[L_VERSION]
    changed_leases[known[L_POD]] = true
  end
  return ''
end

local out, restored = {}, {}
for i, lease in ipairs(rows) do
  local known = lease_of(lease[L_POD])
  if known then
    out[i] = meet(known, lease)
  else
    local takes = parse(lease[L_TAKES])
    out[i] = clash(lease, takes) or ''
    if out[i] == '' then
      write(lease, takes)
      restored[#restored + 1] = lease[L_POD]
    end
  end
end
leave_waiting(restored)
if next(changed_leases) then flush('restored') end
return pack(out)
