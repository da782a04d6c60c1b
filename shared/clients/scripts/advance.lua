-- Move leases on: arguments are {'bound', rows of {pod, version read,
-- first fence}} or {'active', rows of {pod}}.
-- Answers per row: the lease; or, if it cannot go there, the stored version, 0 without a lease.
local to, rows = A[1], A[2]

local pods = {}
for i, row in ipairs(rows) do pods[i] = row[1] end
fetch('lease', pods)

-- True: it moves. False: it is there already, by the same reservation. Nil: it cannot.
local function bound(lease, version, fence)
  if lease[L_STATE] == 'reserved' then
    if lease[L_VERSION] == version then return true end
    return nil
  end
  if lease[L_ORIGIN] == version or lease[L_VERSION] == version or lease[L_GRANTS][2] == fence then
    return false
  end
end

local function active(lease)
  if lease[L_STATE] == 'bound' then return true end
  if lease[L_STATE] == 'active' then return false end
end

local out, moved = {}, false
for i, row in ipairs(rows) do
  local lease = leases[row[1]]
  local move
  if lease then
    if to == 'bound' then move = bound(lease, row[2], row[3]) else move = active(lease) end
  end
  if move then
    lease[L_STATE], lease[L_VERSION], lease[L_EXPIRES] = to, next_version(), 0
    changed_leases[row[1]] = true
    moved = true
  end
  if lease and move ~= nil then out[i] = lease else out[i] = lease and lease[L_VERSION] or 0 end
end
if moved then flush(to) end
return pack(out)
