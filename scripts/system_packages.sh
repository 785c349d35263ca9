#!/usr/bin/env bash
# Check that the system libraries for headless rendering are installed; if not, install them if this user is root and
# has apt-get, else say how. make runs this script.
set -euo pipefail
packages="libegl1 libopengl0 libgl1-mesa-dri"

complete() {
    local library libraries
    libraries=$(ldconfig -p)
    for library in libEGL.so.1 libOpenGL.so.0; do
        [[ $libraries == *$library* ]] || return 1
    done
    # Without a vendor file libEGL finds no driver, neither Mesa's nor NVIDIA's.
    compgen -G '/usr/share/glvnd/egl_vendor.d/*.json' >/dev/null || compgen -G '/etc/glvnd/egl_vendor.d/*.json' >/dev/null
}

export PATH=$PATH:/sbin:/usr/sbin
complete && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "installing system libraries for headless rendering: $packages"
    apt-get update -qq
    # shellcheck disable=SC2086
    DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $packages >/dev/null
    complete && exit 0
fi
echo "headless rendering needs system libraries that are missing; install them with: sudo apt-get install $packages" >&2
exit 2
