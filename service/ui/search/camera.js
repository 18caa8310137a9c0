// A live camera in a dialog. Where the browser has none, the camera app or a file replaces it.

import { ui } from "../shared/dom.js";

const WIDEST_PX = 1920;
const QUALITY = 0.92;
const REASONS = {
  NotAllowedError: "The camera is blocked for this page. Allow it in the browser, or choose a photo.",
  NotFoundError: "There is no camera here. Choose a photo instead.",
  NotReadableError: "Another program is using the camera. Close it, or choose a photo.",
};
let stream = null;
let facing = "environment";
let opened = 0;

function stop() {
  opened += 1;
  stream?.getTracks().forEach((track) => track.stop());
  stream = null;
  ui["camera-video"].srcObject = null;
  ui["camera-shoot"].disabled = true;
}

async function start() {
  stop();
  const mine = opened;
  ui["camera-text"].textContent = "Starting the camera…";
  const video = { facingMode: facing, width: { ideal: WIDEST_PX } };
  try {
    const found = await navigator.mediaDevices.getUserMedia({ video, audio: false });
    if (mine !== opened || !ui["camera-dialog"].open) {
      return found.getTracks().forEach((track) => track.stop());
    }
    stream = found;
    ui["camera-video"].srcObject = found;
    await ui["camera-video"].play();
    await showOtherCamera();
    ui["camera-shoot"].disabled = false;
    ui["camera-text"].textContent = "";
  } catch (error) {
    if (mine !== opened) return;
    ui["camera-text"].textContent = REASONS[error.name] ?? `The camera did not start (${error.name}).`;
  }
}

async function showOtherCamera() {
  const devices = await navigator.mediaDevices.enumerateDevices();
  ui["camera-turn"].hidden = devices.filter(({ kind }) => kind === "videoinput").length < 2;
}

function frame() {
  const video = ui["camera-video"];
  const canvas = document.createElement("canvas");
  Object.assign(canvas, { width: video.videoWidth, height: video.videoHeight });
  canvas.getContext("2d").drawImage(video, 0, 0);
  return new Promise((resolve) => canvas.toBlob(resolve, "image/jpeg", QUALITY));
}

async function shoot(onImage) {
  const blob = await frame();
  ui["camera-dialog"].close();
  if (blob) onImage(new File([blob], "photo.jpg", { type: "image/jpeg" }));
}

function open() {
  if (!navigator.mediaDevices?.getUserMedia) return ui.photo.click(); // not a secure context
  ui["camera-dialog"].showModal();
  start();
}

export function startCamera(onImage) {
  ui.camera.addEventListener("click", open);
  ui["camera-shoot"].addEventListener("click", () => shoot(onImage));
  ui["camera-close"].addEventListener("click", () => ui["camera-dialog"].close());
  ui["camera-turn"].addEventListener("click", () => {
    facing = facing === "environment" ? "user" : "environment";
    start();
  });
  ui["camera-file"].addEventListener("click", () => {
    ui["camera-dialog"].close();
    ui.photo.click();
  });
  ui["camera-dialog"].addEventListener("close", stop);
}
