#!/usr/bin/env bash
# Check that the system libraries for headless rendering are installed; if not, install them if this user is root and
# has apt-get, else say how. make runs this script.
set -euo pipefail
packages="libegl1 libopengl0 libgl1-mesa-dri"
fedora_packages="libglvnd-egl libglvnd-opengl mesa-libEGL mesa-dri-drivers"

# Print the name of each thing that is missing.
missing() {
    local library libraries
    libraries=$(ldconfig -p)
    for library in libEGL.so.1 libOpenGL.so.0; do
        [[ $libraries == *$library* ]] || echo "$library"
    done
    # Without a vendor file libEGL finds no driver, neither Mesa's nor NVIDIA's.
    compgen -G '/usr/share/glvnd/egl_vendor.d/*.json' >/dev/null || compgen -G '/etc/glvnd/egl_vendor.d/*.json' >/dev/null ||
        echo "the vendor files of libEGL's drivers"
}

export PATH=$PATH:/sbin:/usr/sbin
[ -z "$(missing)" ] && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "installing system libraries for headless rendering: $packages"
    apt-get update -qq
    # shellcheck disable=SC2086
    DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $packages >/dev/null
    [ -z "$(missing)" ] && exit 0
fi
repair="Debian, Ubuntu: sudo apt-get install $packages; Fedora: sudo dnf install $fedora_packages"
echo "missing for headless rendering: $(missing | paste -sd, | sed 's/,/, /g'); install it ($repair)" >&2
exit 2
